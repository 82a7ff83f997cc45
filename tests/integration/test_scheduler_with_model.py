"""The scheduler over real forward passes: in any company, every output equals the request's solo run, bit by bit."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from nanoserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from nanoserve.ipc.messages import EngineFacts
from nanoserve.runner.executor import create_executor
from nanoserve.runner.model_runner import ModelRunner
from tests.storms import Scenario, storm

pytestmark = pytest.mark.slow

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 139,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
NUM_STORMS = 12
BACKENDS = {  # dtype, block size, attention backend, type of the KV cache
    "torch": ("float32", 4, "torch", "auto"),
    "torch-int8": ("float32", 4, "torch", "int8"),
    "native": ("bfloat16", 16, "auto", "auto"),
    "native-int8": ("bfloat16", 16, "auto", "int8"),
}


def make_runner(model_dir: Path, backend: str, num_blocks: int) -> tuple[ModelRunner, EngineFacts]:
    """A tiny random Llama; equal weights in every runner of one backend."""
    dtype, block_size, asked, kv_dtype = BACKENDS[backend]
    (model_dir / "config.json").write_text(json.dumps(MODEL))
    config = ServerConfig(
        model=ModelConfig(load_format="dummy", dtype=dtype, seed=3, cache_dir=str(model_dir), max_model_len=256),
        engine=EngineConfig(device="cpu", engine_threads=1, attention_backend=asked),
        scheduler=SchedulerConfig(max_num_seqs=8),
        cache=CacheConfig(block_size=block_size, num_kv_blocks=num_blocks, kv_cache_dtype=kv_dtype),
    )
    return create_executor(config, model_dir, lambda stage, progress: None)


@pytest.mark.rule(33, 34)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_output_equals_the_solo_run(backend: str, tmp_path: Path) -> None:
    block_size = BACKENDS[backend][1]
    solo_runner, facts = make_runner(tmp_path, backend, 64)
    if backend.startswith("native") and facts.attention_backend != "native":
        pytest.skip("the C++ engine cannot run on this machine")
    assert facts.batch_invariant and (facts.kv_cache_dtype == "int8") == backend.endswith("int8")
    preemptions = hits = 0
    outputs = set()
    for seed in range(NUM_STORMS):
        random = Random(seed)
        asked, limits = storm(random, vocab_size=facts.vocab_size, block_size=block_size, scale=max(1, block_size // 4))
        runner, _ = make_runner(tmp_path, backend, limits["num_blocks"])
        scenario = Scenario(asked, limits, runner, solo_runner)
        scenario.play()
        scenario.check()
        assert len(runner._table) == 0
        preemptions += scenario.scheduler.counters.preemptions > 0
        hits += scenario.scheduler.counters.prefix_hit_tokens > 0
        outputs |= {tuple(story.output) for story in scenario.stories.values()}
    assert preemptions >= 3
    assert hits >= 3
    assert len({token for output in outputs for token in output}) > 20, "a model that always says the same"
