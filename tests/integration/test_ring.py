"""Facts about the whole ring that only step counts can show: first frame, hang-up, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from nanoserve.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig, SimConfig
from tests.integration.event_reader import EventReader
from tests.integration.ring import Ring, running_ring, wait_until
from tests.sse_grammar import read_stream

pytestmark = pytest.mark.slow


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    config = ServerConfig(
        model=ModelConfig(model="sim"),
        sim=SimConfig(sim_step_ms=0.2),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64),
        cache=CacheConfig(num_kv_blocks=200),
    )
    with running_ring(config, monkeypatch) as running:
        yield running


@pytest.mark.rule(72)
async def test_the_first_frame_arrives_when_one_token_exists(ring: Ring) -> None:
    """`max_tokens=16` and a gate that lets one step through: the text of token 1 must reach the client."""
    ring.gate.close()
    body = {"prompt": "Good day to you", "max_tokens": 16, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        post = asyncio.create_task(session.post(f"{ring.base_url}/v1/completions", json=body))
        ring.gate.let_through(1)
        async with await asyncio.wait_for(post, 20) as response:
            assert response.status == 200
            reader = EventReader(response)
            first = await reader.next_json()
            assert first["choices"][0]["text"]
            assert ring.executor.tokens[ring.executor.last_request_id] == 1
            ring.gate.open()
            events = [first, *await reader.rest_json()]
    text = "".join(event["choices"][0]["text"] for event in events)
    assert text.startswith("Good day to you")
    assert ring.executor.tokens[ring.executor.last_request_id] == 16


@pytest.mark.case(39)
@pytest.mark.rule(73)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "unary"])
async def test_a_hang_up_ends_the_request_within_three_steps(ring: Ring, stream: bool) -> None:
    """The client goes after two of 200 tokens. The gate then opens step by step, as a slow model would."""
    ring.gate.close()
    address = urlsplit(ring.base_url)
    body = json.dumps({"prompt": "a b c d e f", "max_tokens": 200, "stream": stream, "ignore_eos": True}).encode()
    connection = socket.create_connection((address.hostname, address.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + body)
    ring.gate.let_through(2)
    if stream:
        received = b""
        connection.settimeout(20)
        while received.count(b"data: ") < 2:
            received += await asyncio.to_thread(connection.recv, 65536)
    else:
        before = ring.executor.last_request_id
        assert await asyncio.to_thread(wait_until, lambda: ring.executor.last_request_id > before)
    request_id = ring.executor.last_request_id
    assert await asyncio.to_thread(wait_until, lambda: ring.executor.tokens[request_id] == 2)
    connection.close()
    for _ in range(20):
        await asyncio.sleep(0.05)
        ring.gate.let_through(1)
    assert await asyncio.to_thread(wait_until, lambda: not ring.core.scheduler.live_ids())
    assert ring.executor.rows[request_id] <= 2 + 3


async def _one(session: aiohttp.ClientSession, ring: Ring, draw: random.Random) -> str:
    """One request of any kind; a third of them hang up at a random point. Returns how it went."""
    body: dict[str, Any] = {
        "max_tokens": draw.randrange(1, 40),
        "stream": draw.random() < 0.5,
        "temperature": draw.choice([0, 1]),
        "ignore_eos": True,
    }
    words = " ".join(draw.choice(["day", "🔥", "naïve", "日本", "x" * 30]) for _ in range(draw.randrange(1, 30)))
    if draw.random() < 0.5:
        path, body["prompt"] = "/v1/completions", [words] * draw.choice([1, 1, 2])
    else:
        path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": words}]
    if draw.random() < 0.2:
        body["n"], body["temperature"] = 2, 1
    if draw.random() < 0.2:
        body["stop"] = [draw.choice(["day x", "本", "xxx", "never"])]
    if draw.random() < 0.1:
        body["prompt"], path = [49152], "/v1/completions"
        body.pop("messages", None)
    abort = draw.random() < 1 / 3
    if not abort:
        async with session.post(ring.base_url + path, json=body) as response:
            data = await response.read()
            if response.status == 200 and body["stream"]:
                num_choices = body.get("n", 1) * (len(body["prompt"]) if "prompt" in body else 1)
                read_stream(data, chat="messages" in body, num_choices=num_choices)
            return str(response.status)

    async def read() -> None:
        async with session.post(ring.base_url + path, json=body) as response:
            async for _ in response.content:
                pass

    task = asyncio.create_task(read())
    await asyncio.sleep(draw.random() * 0.3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return "aborted"


@pytest.mark.rule(30, 74)
async def test_nothing_is_left_of_a_thousand_mixed_requests(ring: Ring, caplog: pytest.LogCaptureFixture) -> None:
    """A third hang up at random points; afterwards every map in all three processes is empty."""
    draw = random.Random(7)
    gate = asyncio.Semaphore(48)
    outcomes: list[str] = []

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def guarded() -> None:
            async with gate:
                outcomes.append(await _one(session, ring, draw))

        await asyncio.wait_for(asyncio.gather(*(guarded() for _ in range(1000))), 100)
    assert outcomes.count("aborted") > 250
    assert outcomes.count("200") > 400
    assert not [outcome for outcome in outcomes if outcome.startswith("5")]
    empty = await asyncio.to_thread(wait_until, lambda: not any(ring.leftovers().values()))
    assert empty, {name: count for name, count in ring.leftovers().items() if count}
    ring.core.scheduler.check_invariants()
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "a hang-up is no fault"
