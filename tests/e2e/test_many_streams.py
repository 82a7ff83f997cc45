"""Many streams at once on `--model sim`, and clients that never read: all exact, and memory is bounded."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.hub.resolve import prepare
from nanoserve.tokenizer import Tokenizer, load_tokenizer
from tests.conftest import StartServer
from tests.e2e.harness import Server, is_alive, wait_until
from tests.sse_grammar import read_stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

COMPLETIONS = "/v1/completions"
NUM_STREAMS = 2000
NUM_DEAF = 500
MIB = 1 << 20


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(prepare(ServerConfig(model=ModelConfig(model="sim")), lambda stage, progress: None))


def request_bytes(prompt: str | list[int], max_tokens: int, **fields: Any) -> bytes:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True, **fields}
    body = json.dumps(fields).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


def dechunked(body: bytes) -> bytes:
    """The body without its chunk sizes; AssertionError unless the last chunk came and nothing after it."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        at = end + 2 + size
        assert body[at : at + 2] == b"\r\n", "a chunk of another length than it says"
        parts.append(body[end + 2 : at])
        at += 2
        if not size:
            assert at == len(body), "something after the last chunk"
            return b"".join(parts)


async def stream_text(port: int, prompt: str, max_tokens: int) -> str:
    """The whole text of one stream through the strict parser, or an AssertionError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes(prompt, max_tokens))
        data = await reader.read()
    finally:
        writer.close()
    head, body = data.split(b"\r\n\r\n", 1)
    assert head.startswith(b"HTTP/1.1 200"), data[:300]
    choice = read_stream(dechunked(body), chat=False).choices[0]
    assert choice.reason == "length"
    return choice.text


def repeated(tokenizer: Tokenizer, prompt: str, max_tokens: int) -> str:
    """What the sim model says to `prompt`: its ids, over and over."""
    ids = tokenizer.encode(prompt, add_special_tokens=True)
    return tokenizer.decode(list(islice(cycle(ids), max_tokens)), skip_special_tokens=True)


def port_of(server: Server) -> int:
    port = urlsplit(server.base_url).port
    assert port is not None
    return port


def allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        if hard != resource.RLIM_INFINITY and hard < count:
            pytest.skip(f"only {hard} open files are allowed here")
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def resident(server: Server) -> dict[str, int]:
    return {name: psutil.Process(pid).memory_info().rss for name, pid in server.pids.items()}


def kernel_tcp_bytes() -> int:
    """What the kernel holds for all TCP connections of this machine."""
    line = next(line for line in Path("/proc/net/sockstat").read_text().splitlines() if line.startswith("TCP:"))
    return int(line.split()[-1]) * resource.getpagesize()


def gauge(server: Server, name: str) -> float:
    lines = server.get("/metrics")[1].splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"nanoserve_{name} "))


async def watch(server: Server, name: str, done: Callable[[], bool]) -> float:
    """The highest value of a gauge until `done`."""
    peak = 0.0
    while not done():
        peak = max(peak, await asyncio.to_thread(gauge, server, name))
        await asyncio.sleep(0.2)
    return peak


def assert_nothing_is_left(server: Server, pids: dict[str, int]) -> None:
    for name in ("api_live_requests", "http_streams_open", "num_requests_running", "detok_states"):
        wait_until(lambda name=name: gauge(server, name) == 0, 30.0, f"{name} is not 0")
    assert server.pids == pids and all(is_alive(pid) for pid in pids.values())


def test_two_thousand_streams_are_whole_and_their_own(start_server: StartServer, tokenizer: Tokenizer) -> None:
    allow_files(8192)
    # slow steps: all of them are there at once, however long it takes to connect
    args = "--max-num-seqs 2048 --max-num-batched-tokens 8192 --kv-cache-memory 2GiB --sim-step-ms 150"
    server = start_server("sim", *args.split())
    port, pids, before = port_of(server), dict(server.pids), resident(server)
    prompts = [f"stream number {number} says {number * 7919} and" for number in range(NUM_STREAMS)]
    max_tokens = 64

    async def all_of_them() -> tuple[list[str], float]:
        streams = asyncio.gather(*(stream_text(port, prompt, max_tokens) for prompt in prompts))
        peak = await watch(server, "http_streams_open", streams.done)
        return await streams, peak

    texts, peak = asyncio.run(all_of_them())
    after = resident(server)
    wrong = [p for p, text in zip(prompts, texts, strict=True) if text != repeated(tokenizer, p, max_tokens)]
    assert not wrong, f"{len(wrong)} streams have another text than their own: {wrong[:5]}"
    assert peak > NUM_STREAMS * 0.95, f"only {peak} of them were there at once"
    assert_nothing_is_left(server, pids)
    for name, num_bytes in after.items():
        assert num_bytes - before[name] < 300 * MIB, f"{name} grew from {before[name]} to {num_bytes}"


def deaf_client(port: int, token_id: int, num_echoed: int) -> socket.socket:
    """Never reads. The echo of its prompt fills the buffers, so that what the model says has to wait."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(request_bytes([token_id] * num_echoed, 10_000, echo=True))
    return client


@pytest.mark.rule(75)
def test_clients_that_never_read_are_cut_and_harm_nobody(start_server: StartServer, tokenizer: Tokenizer) -> None:
    """They end at the cap of what is kept for them: there is no time limit here. Beside them streams stay exact."""
    allow_files(8192)
    args = "--max-num-seqs 1024 --max-num-batched-tokens 4096 --max-model-len 32768 --kv-cache-memory 4GiB"
    server = start_server("sim", *args.split(), "--stream-buffer-bytes", "2048", "--write-timeout", "0")
    port, pids = port_of(server), dict(server.pids)
    before = {**resident(server), "kernel": kernel_tcp_bytes()}
    peak = dict.fromkeys(before, 0)
    num_read = 0

    async def neighbour(number: int) -> None:
        nonlocal num_read
        prompt = f"neighbour {number} reads all of it"
        while gauge_of_cut < NUM_DEAF:
            assert await stream_text(port, prompt, 50) == repeated(tokenizer, prompt, 50)
            num_read += 1

    async def watcher() -> None:
        nonlocal gauge_of_cut
        while gauge_of_cut < NUM_DEAF:
            gauge_of_cut = await asyncio.to_thread(gauge, server, "slow_readers_cut_total")
            for name, num_bytes in {**resident(server), "kernel": kernel_tcp_bytes()}.items():
                peak[name] = max(peak[name], num_bytes)
            await asyncio.sleep(0.2)

    async def scene() -> None:
        async with asyncio.timeout(150):
            await asyncio.gather(watcher(), *(neighbour(number) for number in range(4)))

    gauge_of_cut = 0.0
    (token_id,) = tokenizer.encode(" responsibilities", add_special_tokens=False)
    # 17 characters each: 119 kB leave room for a few events, 340 kB block the very first write
    deaf = [deaf_client(port, token_id, 20_000 if number < 10 else 7000) for number in range(NUM_DEAF)]
    try:
        asyncio.run(scene())
        assert gauge(server, "slow_readers_cut_total") == NUM_DEAF and num_read >= 4
        assert_nothing_is_left(server, pids)
    finally:
        for client in deaf:
            client.close()
    for name, num_bytes in peak.items():  # a prompt of 7,000 ids, its echo, the transport's and the kernel's buffers
        most = NUM_DEAF * (MIB // 4 if name == "kernel" else MIB)
        assert num_bytes - before[name] < most, f"{name} grew from {before[name]} to {num_bytes}"


def test_api_workers_share_the_port(start_server: StartServer, tmp_path: Path) -> None:
    server = start_server("sim", "--api-workers", "2")
    port = port_of(server)
    prompts = [f"worker test {number} and" for number in range(60)]

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(stream_text(port, prompt, 8) for prompt in prompts))

    texts = asyncio.run(all_of_them())
    assert all((prompt * 3).startswith(text) and text for prompt, text in zip(prompts, texts, strict=True))
    served = {server.get("/server_info")[1]["pid"] for _ in range(40)}
    assert served <= {server.pids["api-0"], server.pids["api-1"]}


def test_a_key_that_floods_does_not_hold_up_another(start_server: StartServer) -> None:
    """One request runs at a time; the modest key's comes in behind forty of the other's and is served next."""
    args = ("sim", "--max-num-seqs", "1", "--scheduling-policy", "fair", "--sim-step-ms", "5")
    server = start_server(*args, "--api-key", "flood", "modest")
    port = port_of(server)
    ended: list[str] = []

    async def ask(key: str) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        data = request_bytes("a b c d", 20).replace(b"\r\n", b"\r\nAuthorization: Bearer " + key.encode() + b"\r\n", 1)
        writer.write(data)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
        ended.append(key)

    async def scene() -> int:
        flood = [asyncio.create_task(ask("flood")) for _ in range(40)]
        while len(ended) < 3:
            await asyncio.sleep(0.01)
        before = len(ended)
        await ask("modest")
        passed_by = len(ended) - 1 - before
        await asyncio.gather(*flood)
        return passed_by

    assert asyncio.run(scene()) <= 3  # the one that ran, one that was due, and what ended while we looked
