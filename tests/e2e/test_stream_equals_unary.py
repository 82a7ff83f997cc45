"""Promise one, seen from outside: joined deltas == unary text == one decode of the returned ids, for hard texts.

A decode token by token runs beside it and must fail on most of them: otherwise they would be too easy to see anything.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.hub.resolve import prepare
from nanoserve.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.harness import Server

pytestmark = pytest.mark.slow

NUM_PROMPTS = 200
_PIECES = [
    "🔥",
    "👍🏽",
    "👨\u200d👩\u200d👧",
    "🏳️\u200d🌈",
    "😀",
    "日本語の本",
    "한국어",
    "책",
    "中文字符",
    "မြန်မာဘာသာ",
    "ကျေးဇူးတင်ပါတယ်",
    "ภาษาไทย",
    "สวัสดี",
    "naïve",
    "café",
    "Zürich",
    "ﬁn",
    "Ångström",
    "é",
    "Привет",
    "שלום",
    "नमस्ते",
    "தமிழ்",
    "العربية",
    "ℵ∑√",
    "the",
    "quick",
    "brown",
    "fox",
    "1,234.56",
    "def",
    "f(x):",
    "\xa0",
    "\u200d",
]


def _prompts() -> list[str]:
    draw = random.Random(20)
    return [
        "".join(draw.choice(_PIECES) + draw.choice([" ", "", "\n", ", "]) for _ in range(draw.randrange(3, 14)))
        for _ in range(NUM_PROMPTS)
    ]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(prepare(ServerConfig(model=ModelConfig(model="sim")), lambda stage, progress: None))


@dataclass
class Both:
    """One prompt, asked unary and streamed at the same time as many others."""

    unary_text: str
    unary_ids: list[int]
    deltas: list[str]
    streamed_ids: list[int]


def _ask(server: Server, body: dict[str, Any]) -> Both:
    status, unary = server.post("/v1/completions", {**body, "return_token_ids": True}, 120)
    assert status == 200, unary
    (choice,) = unary["choices"]
    deltas, ids = [], []
    *events, last = server.stream("/v1/completions", {**body, "return_token_ids": True}, 120)
    assert last == "[DONE]"
    for event in map(json.loads, events):
        for piece in event["choices"]:
            deltas.append(piece["text"])
            ids += piece.get("token_ids") or []
    return Both(choice["text"], choice["token_ids"], deltas, ids)


def _check(server: Server, bodies: list[dict[str, Any]], tokenizer: Tokenizer, concurrency: int) -> int:
    """Returns for how many of them a decode token by token is wrong."""
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda body: _ask(server, body), bodies))
    naive_wrong = 0
    for body, answer in zip(bodies, answers, strict=True):
        whole = tokenizer.decode(answer.unary_ids, skip_special_tokens=True)
        assert answer.streamed_ids == answer.unary_ids, body
        assert answer.unary_text == whole, body
        assert "".join(answer.deltas) == whole, body
        naive_wrong += "".join(tokenizer.decode([token_id]) for token_id in answer.unary_ids) != whole
    return naive_wrong


@pytest.mark.rule(43)
def test_hard_texts(sim_server: Server, tokenizer: Tokenizer) -> None:
    """The sim model says the prompt again, for a random number of tokens: it ends anywhere, even in a character."""
    draw = random.Random(21)
    bodies = [{"prompt": p, "max_tokens": draw.randrange(1, 90), "ignore_eos": True} for p in _prompts()]
    naive_wrong = _check(sim_server, bodies, tokenizer, concurrency=16)
    assert naive_wrong > NUM_PROMPTS / 2, f"these texts are too easy: a naive decode is wrong on {naive_wrong} only"


@pytest.mark.rule(43)
def test_the_real_model_at_high_temperature(smollm2_server: Server, tokenizer: Tokenizer) -> None:
    """Seeded sampling repeats its draws, so both forms get the same ids, and at this temperature hard ones."""
    bodies = [
        {"prompt": prompt, "max_tokens": 24, "temperature": 2.0, "seed": seed}
        for seed, prompt in enumerate(_prompts()[:24])
    ]
    naive_wrong = _check(smollm2_server, bodies, tokenizer, concurrency=8)
    assert naive_wrong > len(bodies) / 4, "these ids are too easy"
