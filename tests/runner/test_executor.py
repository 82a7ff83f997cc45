"""From a model directory to an executor: files read and checked, and what the configuration leaves open decided."""

from __future__ import annotations

import json
import logging
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanoserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from nanoserve.errors import ConfigError, StartupError
from nanoserve.hub.model_files import read_model_files
from nanoserve.runner import executor as executor_module
from nanoserve.runner.executor import choose_device, choose_dtype, create_executor
from nanoserve.runner.kv_cache import bytes_per_block, choose_num_blocks
from nanoserve.runner.loader import dummy_weights, load_weights
from nanoserve.runner.models import read_model_spec, supported_architectures
from nanoserve.runner.native import memory
from nanoserve.runner.native.build import missing_cpu_features
from nanoserve.runner.native.packing import ALIGNMENT
from tests.runner import tiny
from tests.runner.native_models import CONFIGS
from tests.runner.plans import Driver

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def keep_threads():
    """An executor sets torch's threads for its process; here other tests follow."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference():
    return tiny.make_reference("gemma3")


@pytest.fixture
def model_dir(reference, tmp_path):
    reference.save_pretrained(tmp_path)
    return tmp_path


def make_config(**sections) -> ServerConfig:
    defaults = {
        "model": ModelConfig(dtype="float32"),
        "engine": EngineConfig(device="cpu", attention_backend="torch", engine_threads=1),
        "scheduler": SchedulerConfig(max_num_seqs=4),
        "cache": CacheConfig(num_kv_blocks=64),
    }
    return ServerConfig(**(defaults | sections))


def create(model_dir, **sections):
    return create_executor(make_config(**sections), model_dir, lambda stage, part: None)


def edit_config(model_dir, **changes) -> None:
    path = model_dir / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(model_dir, edit) -> None:
    path = model_dir / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def first_tokens(executor, count: int = 8) -> list[int]:
    driver = Driver(executor, num_blocks=64, block_size=16)
    driver.add(1, list(range(3, 40)), count, temperature=0.0)
    driver.run()
    return driver.outputs[1]


def test_a_directory_is_served(reference, model_dir):
    executor, facts = create(model_dir)
    ids = list(range(3, 40))
    for token in first_tokens(executor):
        assert token == int(tiny.reference_logits(reference, ids)[-1].argmax())
        ids.append(token)
    assert (facts.dtype, facts.device, facts.attention_backend, facts.batch_invariant) == (
        "float32",
        "cpu",
        "torch",
        True,
    )
    assert (facts.num_blocks, facts.block_size, facts.vocab_size) == (64, 16, tiny.VOCAB)
    spec = tiny.make_spec(reference)
    assert facts.kv_bytes == 64 * bytes_per_block(spec, 16, torch.float32)
    assert facts.num_parameters == sum(parameter.numel() for parameter in reference.parameters())
    assert facts.weights_bytes == 4 * facts.num_parameters
    assert facts.context_bytes == bytes_per_block(spec, 1, torch.float32) // 3, "one layer in three sees all"


@pytest.mark.skipif(bool(missing_cpu_features()), reason="the CPU lacks what the engine needs")
def test_weights_are_counted_as_the_engine_keeps_them(tmp_path, monkeypatch):
    """What /server_info says of the engine is what the memory ledger says of its process, for each quantization."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS["llama"], "model_type": "llama"}))
    claimed: dict[str, int] = {}
    monkeypatch.setattr(memory, "claim", lambda owner, address, size: claimed.update({owner: size}))
    told = {}
    for quantization in ("none", "int8"):
        model = ModelConfig(dtype="bfloat16", load_format="dummy", quantization=quantization)
        executor, facts = create(tmp_path, model=model, engine=EngineConfig(device="cpu", engine_threads=1))
        assert facts.attention_backend == "native"
        executor.close()
        assert executor._backend._kv is None
        assert 0 <= claimed["weights"] - facts.weights_bytes < ALIGNMENT
        told[quantization] = facts.weights_bytes
    assert told["int8"] < told["none"]


def test_a_closed_executor_gives_its_keys_and_values_back(model_dir):
    executor, _ = create(model_dir)
    cache = weakref.ref(executor._backend._cache)
    first_tokens(executor)
    executor.close()
    assert cache() is None


def test_int8_keys_and_values_hold_more_tokens_in_the_same_memory(reference, model_dir):
    kv_memory = 1 << 20
    spec = tiny.make_spec(reference)
    facts = {}
    for kv_dtype in ("auto", "bfloat16", "int8"):
        cache = CacheConfig(kv_cache_memory=kv_memory, kv_cache_dtype=kv_dtype)
        facts[kv_dtype] = create(model_dir, cache=cache)[1]
    assert [facts[name].kv_cache_dtype for name in facts] == ["float32", "bfloat16", "int8"]
    per_head = {"auto": 4 * spec.head_dim, "bfloat16": 2 * spec.head_dim, "int8": spec.head_dim + 4}  # a key or a value
    for name, each in facts.items():
        block = 16 * 2 * spec.num_layers * spec.num_kv_heads * per_head[name]
        assert (each.num_blocks, each.kv_bytes) == (kv_memory // block, kv_memory // block * block)


def test_sharded_is_the_same(reference, model_dir, tmp_path_factory):
    sharded = tmp_path_factory.mktemp("sharded")
    reference.save_pretrained(sharded, max_shard_size="40KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert first_tokens(create(sharded)[0]) == first_tokens(create(model_dir)[0])


def test_progress_is_real(model_dir):
    seen: list[tuple[str, float]] = []
    create_executor(make_config(), model_dir, lambda stage, part: seen.append((stage, part)))
    loading = [part for stage, part in seen if stage == "loading weights"]
    assert loading == sorted(loading)
    assert len(loading) > 20
    assert loading[-1] == 1.0
    assert seen[-1] == ("warming up", 1.0)


def test_dummy_weights_need_no_files_and_repeat(model_dir):
    (model_dir / "model.safetensors").unlink()
    config = ModelConfig(dtype="float32", load_format="dummy", seed=5)
    assert first_tokens(create(model_dir, model=config)[0]) == first_tokens(create(model_dir, model=config)[0])
    spec = read_model_spec(read_model_files(model_dir, need_weights=False).config)
    weights = dummy_weights(spec, torch.bfloat16, 5, lambda part: None)
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == spec.tensor_shapes()


def test_missing_unexpected_and_misshapen_tensors_are_named(model_dir):
    spec = read_model_spec(read_model_files(model_dir).config)

    def load():
        return load_weights(read_model_files(model_dir).weight_files, spec, torch.float32, lambda part: None)

    name = "model.layers.1.mlp.down_proj.weight"
    edit_weights(model_dir, lambda weights: weights.update({name: weights[name][:-1].contiguous()}))
    with pytest.raises(StartupError, match=r"down_proj\.weight has shape"):
        load()
    edit_weights(model_dir, lambda weights: weights.pop(name))
    with pytest.raises(StartupError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        load()
    edit_weights(model_dir, lambda weights: weights.update({"model.layers.9.odd": torch.zeros(1)}))
    with pytest.raises(StartupError, match=r"unexpected tensor model\.layers\.9\.odd"):
        load()


def test_a_truncated_file_is_named(model_dir):
    path = model_dir / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(StartupError, match=r"model\.safetensors cannot be read"):
        create(model_dir)


def test_a_multimodal_checkpoint_gives_its_language_model(reference, model_dir):
    expected = first_tokens(create(model_dir)[0])
    text = json.loads((model_dir / "config.json").read_text())
    (model_dir / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    )

    def rename(weights):
        for name in list(weights):
            weights["language_model." + name] = weights.pop(name)
        weights["vision_tower.x"] = torch.zeros(3)

    edit_weights(model_dir, rename)
    assert first_tokens(create(model_dir)[0]) == expected


def test_an_unknown_family_is_named_with_those_that_are_known(model_dir):
    edit_config(model_dir, architectures=["FalconForCausalLM"])
    with pytest.raises(StartupError, match=r"FalconForCausalLM is not supported.*LlamaForCausalLM"):
        create(model_dir)
    assert "Qwen3ForCausalLM" in supported_architectures()


@pytest.mark.parametrize(
    "changes", [{"hidden_activation": "relu"}, {"rope_parameters": {"rope_type": "yarn"}}, {"attention_bias": True}]
)
def test_switches_that_are_not_implemented_are_refused(model_dir, changes):
    edit_config(model_dir, **changes)
    with pytest.raises(StartupError, match="not supported"):
        create(model_dir)


def test_weights_that_give_no_numbers_end_the_start(model_dir):
    edit_weights(model_dir, lambda weights: weights["model.norm.weight"].fill_(float("nan")))
    with pytest.raises(StartupError, match="not a number"):
        create(model_dir)


def test_context_is_the_models_or_less(model_dir):
    assert create(model_dir, cache=CacheConfig(num_kv_blocks=200))[1].max_model_len == 2048
    config = ModelConfig(dtype="float32", max_model_len=100)
    assert create(model_dir, model=config)[1].max_model_len == 100
    with pytest.raises(ConfigError, match="2048"):
        create(model_dir, model=ModelConfig(max_model_len=4096))


def test_context_shrinks_to_the_kv_memory_and_says_so(model_dir, caplog):
    with caplog.at_level(logging.WARNING):
        assert create(model_dir, cache=CacheConfig(num_kv_blocks=3))[1].max_model_len == 48
    assert "48 tokens" in caplog.text


def test_one_block_of_one_token_is_enough_to_start(model_dir):
    assert create(model_dir, cache=CacheConfig(num_kv_blocks=1, block_size=1))[1].max_model_len == 1


def test_number_of_kv_blocks():
    scheduler = SchedulerConfig(max_num_seqs=4)

    def blocks(cache: CacheConfig, free: int = 1 << 30) -> int:
        return choose_num_blocks(cache, scheduler, block_bytes=1000, max_model_len=100, free_bytes=free)

    assert blocks(CacheConfig(num_kv_blocks=7, kv_cache_memory=1 << 30)) == 7
    assert blocks(CacheConfig(kv_cache_memory=25_999)) == 25
    assert blocks(CacheConfig()) == 4 * 7  # what the limits can use
    assert blocks(CacheConfig(), free=40_000) == 10  # a quarter
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        blocks(CacheConfig(kv_cache_memory=999))


def test_device_and_type(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == cpu
    with pytest.raises(ConfigError, match="no GPU"):
        choose_device("cuda")
    assert choose_dtype("float16", cpu) is torch.float16
    for flags, expected in ((set(), torch.float32), ({"avx512_bf16"}, torch.bfloat16), ({"amx_bf16"}, torch.bfloat16)):
        monkeypatch.setattr(executor_module, "_cpu_flags", lambda flags=flags: flags)
        assert choose_dtype("auto", cpu) is expected


def test_the_native_engine_falls_back_with_one_line(model_dir, caplog):
    """float32 is not its type; the plain path serves."""
    with caplog.at_level(logging.WARNING):
        _, facts = create(model_dir, engine=EngineConfig(device="cpu", engine_threads=1))
    assert facts.attention_backend == "torch"
    assert len([record for record in caplog.records if "C++ engine" in record.getMessage()]) == 1
