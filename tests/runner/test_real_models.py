"""Real weights: greedy ids of 20 prompts x 64 tokens are transformers' own, in fp32; bf16 is sensible."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from nanoserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from nanoserve.hub.resolve import prepare
from nanoserve.runner.executor import create_executor
from tests.runner.plans import Driver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
NUM_TOKENS = 64
NUM_BLOCKS = 400
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 1, 2, 3, 5, 8,",
    "Dear Sir or Madam,\n\n",
    "The three primary colours are",
    "import numpy as np\n\n",
    "Ein Hund und eine Katze",
    "日本の首都は",
    "In the year 1969",
    "Q: How many legs does a spider have?\nA:",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "🙂 is an emoji that means",
    "To be, or not to be,",
    "A recipe for bread: first",
    "The mitochondria is",
    "x = 12 * 12\nprint(x)  #",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
    * 6,
]


@pytest.fixture(autouse=True)
def keep_threads():
    """An executor sets torch's threads for its process; here other tests follow. One, so that a busy machine does
    not make two wait for each other at every operation."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Model:
    name: str
    directory: Path
    tokenizer: Tokenizer
    prompts: list[list[int]]


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def model(request) -> Model:
    directory = prepare(ServerConfig(model=ModelConfig(model=request.param)), lambda stage, part: None)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return Model(request.param, directory, tokenizer, [tokenizer.encode(text).ids for text in PROMPTS])


def greedy(model: Model, prompts: list[list[int]], dtype: str, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """All prompts as one batch, the long one in chunks."""
    config = ServerConfig(
        model=ModelConfig(model=model.name, dtype=dtype, max_model_len=512),
        engine=EngineConfig(device="cpu", attention_backend="torch", engine_threads=1),
        scheduler=SchedulerConfig(max_num_seqs=len(prompts)),
        cache=CacheConfig(num_kv_blocks=NUM_BLOCKS),
    )
    stages: list[tuple[str, float]] = []
    executor, facts = create_executor(config, model.directory, lambda stage, part: stages.append((stage, part)))
    assert facts.max_model_len == 512
    assert ("loading weights", 1.0) in stages
    driver = Driver(executor, num_blocks=NUM_BLOCKS, block_size=16)
    for request_id, prompt in enumerate(prompts):
        driver.add(request_id, prompt, num_tokens, temperature=0.0)
    driver.run(chunk=100)
    return [driver.outputs[request_id] for request_id in range(len(prompts))]


def load_reference(model: Model) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval()


def test_greedy_ids_are_those_of_transformers(model):
    outputs = greedy(model, model.prompts, "float32")
    reference = load_reference(model)
    with torch.inference_mode():
        # Each token is the reference's choice after the same tokens: by induction this is what `generate` gives,
        # for a twentieth of the time.
        for prompt, output in zip(model.prompts, outputs, strict=True):
            logits = reference(torch.tensor([prompt + output])).logits[0]
            assert output == logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
        prompt, output = model.prompts[0], outputs[0]
        generated = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            repetition_penalty=1.0,
            min_new_tokens=NUM_TOKENS,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            temperature=None,
            top_k=None,
            top_p=None,
        )[0]
        assert generated[len(prompt) :].tolist() == output


def test_bfloat16_is_sensible(model):
    outputs = greedy(model, model.prompts[2:4], "bfloat16", num_tokens=12)
    assert "if n == 0" in model.tokenizer.decode(outputs[0])
    assert "100" in model.tokenizer.decode(outputs[1])  # Water boils at
