"""Many streams at once on `--model sim`, and clients that never read: all exact, and memory is bounded."""

from __future__ import annotations

import asyncio
import json
import resource
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.conftest import StartServer
from tests.e2e.harness import Server, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]

COMPLETIONS = "/v1/completions"


def request_bytes(prompt: str, max_tokens: int) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def stream_text(port: int, prompt: str, max_tokens: int) -> str:
    """The whole text of one stream, or an AssertionError."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request_bytes(prompt, max_tokens))
        data = await reader.read()
    finally:
        writer.close()
    assert data.startswith(b"HTTP/1.1 200"), data[:300]
    assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), data[-200:]
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["text"] for event in events)


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


def rss_mib(server: Server, name: str) -> float:
    return float(psutil.Process(server.pids[name]).memory_info().rss) / 2**20


def test_two_thousand_streams_are_whole_and_their_own(start_server: StartServer) -> None:
    allow_files(8192)
    args = ("sim", "--max-num-seqs", "2048", "--max-num-batched-tokens", "8192", "--kv-cache-memory", "2GiB")
    server = start_server(*args)
    port = port_of(server)
    before = rss_mib(server, "api-0")
    prompts = [f"stream number {number} says {number * 7919} and" for number in range(2000)]

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(stream_text(port, prompt, 24) for prompt in prompts))

    texts = asyncio.run(all_of_them())
    for prompt, text in zip(prompts, texts, strict=True):
        assert text and (prompt * 4).startswith(text), (prompt, text)  # sim repeats its prompt
    assert rss_mib(server, "api-0") - before < 300
    idle = "nanoserve_api_live_requests 0.0"
    wait_until(lambda: idle in server.get("/metrics")[1], 10.0, "a request is left in the api process")


def test_clients_that_never_read_are_cut_and_harm_nobody(start_server: StartServer) -> None:
    """500 of them, each with far more text than the socket buffers and the cap hold."""
    allow_files(8192)
    args = ("sim", "--max-num-seqs", "1024", "--max-num-batched-tokens", "4096", "--max-model-len", "8192")
    server = start_server(*args, "--stream-buffer-bytes", "4096", "--write-timeout", "3", "--kv-cache-memory", "4GiB")
    port = port_of(server)

    async def scene() -> tuple[str, float]:
        deaf = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(500)]
        for _, writer in deaf:
            writer.get_extra_info("socket").setsockopt(1, 8, 4096)  # SOL_SOCKET, SO_RCVBUF
            writer.write(request_bytes("word " * 50, 3000))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        text = await stream_text(port, "a b c d e f g h", 200)
        memory = rss_mib(server, "api-0")
        for _, writer in deaf:
            writer.close()
        return text, memory

    text, memory = asyncio.run(scene())
    assert ("a b c d e f g h" * 60).startswith(text) and len(text) > 100
    assert memory < 700
    idle = "nanoserve_num_requests_running 0.0"
    wait_until(lambda: idle in server.get("/metrics")[1], 60.0, "a request still runs")


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
