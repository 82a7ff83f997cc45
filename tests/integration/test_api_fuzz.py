"""No input is worth a 5xx: schema-made bodies, mutated bodies, and neighbours that stay exact meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from tests.integration.api_ring import Api
from tests.sse_grammar import SseParser

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NUM_MUTATIONS = 5000
SEEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "n": 2, "stop": ["x"], "logit_bias": {"5": 1}}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 3, "logprobs": 2, "echo": True}),
    ("/v1/completions", {"prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}, "seed": 5}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "top_k": 3}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}),
    ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 2, "temperature": 0.5}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "system": "s"}),
    ("/tokenize", {"prompt": "abc", "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2]}),
]  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**70, 1.5, -0.0, 1e308, "", "x", "\ud800", "\x00",
    "a" * 5000,    [], [[]], [None], [[1], "a"], {}, {"a": {}}, [1, -1], ["\U0010ffff"], {"type": "text"}, "true",
]  # fmt: skip

FIELDS = ["stop", "n", "top_p", "min_p", "echo", "priority", "zzz", "tools", "timeout_s", "stream"]
HEADERS = {"Content-Type": "application/json"}


def mutated(rng: random.Random, body: Any) -> Any:
    """A copy with one place replaced, removed or doubled."""
    body = json.loads(json.dumps(body))
    node, key = body, None
    parents: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for at, inner in entries:
            parents.append((value, at))
            walk(inner)

    walk(body)
    node, key = rng.choice(parents)
    action = rng.randrange(3)
    if action == 0:
        node[key] = rng.choice(ODD)
    elif action == 1 and isinstance(node, dict):
        node[rng.choice(FIELDS)] = rng.choice(ODD)
    else:
        del node[key]
    return body


def as_bytes(rng: random.Random, body: Any) -> bytes:
    """Its JSON, now and then with broken bytes."""
    data = bytearray(json.dumps(body, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.15 and data:
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.03 else data)


@pytest.mark.rule(14)
async def test_mutated_bodies_never_make_a_5xx_and_leave_nothing_behind(api: Api) -> None:
    rng = random.Random(20)
    bad: list[Any] = []
    done = 0

    async def neighbour() -> None:
        while done < NUM_MUTATIONS:
            status, body = await api.post("/v1/completions", {"prompt": "n", "max_tokens": 4})
            assert (status, body["choices"][0]["text"]) == (200, "aaaa")

    async def worker(count: int) -> None:
        nonlocal done
        for _ in range(count):
            path, body = rng.choice(SEEDS)
            for _ in range(rng.randrange(1, 4)):
                body = mutated(rng, body) if body else body
            data = as_bytes(rng, body)
            async with api.http.post(api.url + path, data=data, headers=HEADERS) as response:
                answer = await response.read()
                clean = response.status < 400 or (len(answer) <= 8192 and b'"error"' in answer)
                if response.content_type == "text/event-stream":
                    parser = SseParser(named=path in ("/v1/responses", "/v1/messages"))
                    parser.feed(answer)
                    parser.close()
                if response.status >= 500 or not clean:
                    bad.append((path, data[:300], response.status, answer[:300]))
            done += 1

    neighbours = asyncio.create_task(neighbour())
    await asyncio.gather(*(worker(NUM_MUTATIONS // 8) for _ in range(8)))
    done = NUM_MUTATIONS
    await neighbours
    assert not bad, bad[:5]
    context = api.process.context
    for _ in range(200):
        if not context.client.num_live and not len(context.pacer):
            break
        await asyncio.sleep(0.01)
    assert (context.client.num_live, context.admission.num_held, len(context.pacer)) == (0, 0, 0)
