"""Valid request bodies and what happens to them: values of other types, other sizes, other shapes, broken bytes.

Pure and seeded: body number i is the same in every run, so a failure names its number.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "temperature": 0}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "n": 2, "stop": ["x"], "logit_bias": {"5": 1}}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "logprobs": 2, "echo": True, "temperature": 0}),
    ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True, "seed": 5, "user": "u"}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1, "stop_token_ids": [7], "min_tokens": 1, "top_p": 0.9}),
    ("/v1/completions", {"prompt": [[5], [6, 7]], "max_tokens": 1, "allowed_token_ids": [8], "bad_words": ["no"]}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "stream": True, "logprobs": True, "top_logprobs": 2, "top_k": 3}),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"a": 1}, "presence_penalty": 0.1, "timeout_s": 9}),
]
NUMBERS: list[Any] = [0, -1, 1, 2, 7, 49151, 49152, 2**31, 2**32, 2**63, -(2**63) - 1, 2**70, 1.5, -0.0, 1e308, 5e-324]
MARK = "Zq7marker"  # no error may repeat it
ODD: list[Any] = [
    *NUMBERS, MARK, [MARK], {MARK: MARK}, {"type": MARK, "role": MARK, "content": MARK}, None, True, False,
    "", "x", "\ud800", "\udfff\ud800", "\x00", "\U0010ffff", "a" * 5000, "true", "{}",
    [], [[]], [None], [[1], "a"], [1, -1], ["", ""], [True], [[[1]]], ["a"] * 300, {}, {"a": {}}, {"type": "text"},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}}, {"": None}, {"1": 1e308, "2": -1},
]  # fmt: skip
FIELDS = [
    "stop", "n", "top_p", "top_k", "min_p", "echo", "priority", "tools", "timeout_s", "queue_timeout_s", "stream",
    "stream_interval", "min_tokens", "max_tokens", "seed", "ignore_eos", "logit_bias", "logprobs", "top_logprobs",
    "prompt_logprobs", "suffix", "best_of", "response_format", "frequency_penalty", "repetition_penalty",
    "request_id", "rid", "cache_salt", "truncate_prompt_tokens", "return_token_ids", "model", "messages", "prompt",
    "allowed_token_ids", "bad_words", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens",
    "add_special_tokens", "continue_final_message", "add_generation_prompt", "chat_template", "chat_template_kwargs",
    "user", MARK,
]  # fmt: skip
RAW = (
    b"", b"null", b"[1]", b'"x"', b"{", b"}", b"{}{}", b"\xff\xfe{\x00", b"\xef\xbb\xbf{}", b"{" * 3000, b"[" * 60_000,
    b'{"prompt":"x","z":' + b"[" * 20_000 + b"]" * 20_000 + b"}", b'{"prompt":"x","z":' + b'{"a":' * 5000,
    b'{"prompt":"x","seed":' + b"9" * 5000 + b"}", b'{"prompt":"x","temperature":NaN}',
    b'{"prompt":"x","top_p":Infinity}',
    b'{"prompt":"x","temperature":1e400}', b'{"prompt":"x","temperature":-1e400}', b'{"prompt":"\\ud800"}',
    b'{"prompt":"x","prompt":5}', b'{"prompt":"x","max_tokens":1.0}', b'{"prompt":"x","max_tokens":1e0}',
    b'{"prompt":"\xed\xa0\x80"}', b'{"prompt":"\xc0\x80"}', b'{"prompt":"\xf4\x90\x80\x80"}', b'{"prompt":"a\x00b"}',
    b'{"prompt":"x"}\x00', b' \n\t{"prompt":"x","max_tokens":1} \r\n', b'{"prompt":"x",}', b"{'prompt':'x'}",
    b'{"prompt":"x","max_tokens":0x10}', b'{"prompt":"x","max_tokens":01}', b'{"prompt":"x"/**/}',
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Body:
    number: int
    path: str
    data: bytes


def make_body(number: int) -> Body:
    """The `number`th body."""
    rng = random.Random(number)
    path, valid = rng.choice(VALID)
    if rng.random() < 0.06:
        return Body(number, path, rng.choice(RAW))
    body: Any = json.loads(json.dumps(valid))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        rng.choice(_CHANGES)(rng, body)
    data = json.dumps(body, ensure_ascii=rng.random() < 0.8).encode("utf-8", "surrogatepass")
    return Body(number, path, _broken(rng, data) if rng.random() < 0.25 else data)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in the tree."""
    entries = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    places = [(value, key) for key, _ in entries]
    for _, inner in entries:
        places += _places(inner)
    return places


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD))


def _replace(rng: random.Random, body: Any) -> None:
    if places := _places(body):
        node, key = rng.choice(places)
        node[key] = _odd(rng)


def _delete(rng: random.Random, body: Any) -> None:
    if places := _places(body):
        node, key = rng.choice(places)
        del node[key]


def _add(rng: random.Random, body: Any) -> None:
    if isinstance(body, dict):
        body[rng.choice(FIELDS)] = _odd(rng)


def _wrap(rng: random.Random, body: Any) -> None:
    """A value becomes a list or an object of itself, up to far too deep."""
    if places := _places(body):
        node, key = rng.choice(places)
        for _ in range(rng.choice((1, 2, 50))):
            node[key] = [node[key]] if rng.random() < 0.7 else {"a": node[key]}


def _copy(rng: random.Random, body: Any) -> None:
    """One value also stands where another was."""
    if places := _places(body):
        (one, a), (other, b) = rng.choice(places), rng.choice(places)
        other[b] = copy.deepcopy(one[a])


_CHANGES: list[Callable[[random.Random, Any], None]] = [_replace, _replace, _delete, _add, _add, _wrap, _copy]


def _broken(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut off, put in or doubled."""
    buffer = bytearray(data)
    kind = rng.randrange(4)
    if kind == 0:
        for _ in range(rng.randrange(1, 4)):
            buffer[rng.randrange(len(buffer))] = rng.randrange(256)
        return bytes(buffer)
    at = rng.randrange(len(buffer))
    if kind == 1:
        return bytes(buffer[:at])
    if kind == 2:
        word = rng.choice((b"NaN", b"1e999", b"-", b"\xff", b"\\ud800", b"\\u0000", b'"', b",", b"[", b"9" * 400))
        return bytes(buffer[:at]) + word + bytes(buffer[at:])
    return bytes(buffer) + bytes(buffer[at:])
