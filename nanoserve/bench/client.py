"""A neutral load client for any OpenAI-style `/v1/completions` stream. Needs aiohttp only.

Prompts are lists of random token ids from a fixed seed; every round takes a fresh seed, so that no prefix cache of an
earlier round helps. Output tokens are counted from the server's `usage`, never from chunks, and every request opens
its own connection (one peer drops reused connections under load, and all servers get the same treatment).
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from nanoserve.bench.stats import percentile

LOWEST_ID, HIGHEST_ID = 1000, 40000  # ordinary tokens of any vocabulary we meet, no specials


@dataclass(frozen=True, slots=True)
class Workload:
    """`concurrency` requests at a time, `num_requests` in all, `prompt_tokens` each after a shared head."""

    concurrency: int
    num_requests: int
    shared_tokens: int
    prompt_tokens: int
    output_tokens: int

    def prompts(self, name: str, seed: int) -> list[list[int]]:
        draw = random.Random(f"{name}-{seed}")
        head = [draw.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(self.shared_tokens)]
        return [
            head + [draw.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(self.prompt_tokens)]
            for _ in range(self.num_requests)
        ]


WORKLOADS = {
    "W1": Workload(1, 4, 0, 128, 128),  # one stream
    "W2": Workload(8, 16, 0, 128, 128),
    "W3": Workload(32, 64, 0, 128, 128),
    "W4": Workload(64, 256, 0, 64, 64),  # many short ones
    "W5": Workload(8, 32, 512, 32, 32),  # a shared system prompt
    "W6": Workload(4, 8, 0, 1536, 32),  # long prompts
}


@dataclass(slots=True)
class Stream:
    """What one request saw; times in seconds."""

    ttft: float | None = None
    e2e: float = 0.0
    gaps: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""


async def _read_stream(response: aiohttp.ClientResponse, stream: Stream, started: float) -> None:
    last = started
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        payload = line[5:].strip()
        if payload == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(payload)
        if event.get("error"):
            stream.error = str(event["error"])[:300]
            return
        if usage := event.get("usage"):
            stream.completion_tokens = usage["completion_tokens"]
            stream.prompt_tokens = usage["prompt_tokens"]
            stream.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        choices = event.get("choices") or []
        if choices and (choices[0].get("text") or (choices[0].get("delta") or {}).get("content")):
            now = time.perf_counter()
            if stream.ttft is None:
                stream.ttft = now - started
            else:
                stream.gaps.append(now - last)
            last = now


async def _one(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Stream:
    stream = Stream()
    started = time.perf_counter()
    try:
        async with session.post(url, json=body) as response:
            if response.status == 200:
                await _read_stream(response, stream, started)
            else:
                stream.error = f"{response.status} {(await response.text())[:300]}"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        stream.error = repr(error)
    stream.e2e = time.perf_counter() - started
    return stream


async def run_workload(
    url: str, model: str, name: str, seed: int, extra: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Runs one round of one workload; returns throughput, latencies in ms, and the client's own CPU seconds.

    `extra` fields are merged into each body; a null value removes the field.
    """
    workload = WORKLOADS[name]
    gate = asyncio.Semaphore(workload.concurrency)
    base: dict[str, Any] = {
        "model": model,
        "max_tokens": workload.output_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    } | (extra or {})
    base = {key: value for key, value in base.items() if value is not None}

    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=900)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:

        async def go(prompt: list[int]) -> Stream:
            async with gate:
                return await _one(session, url, base | {"prompt": prompt})

        before = resource.getrusage(resource.RUSAGE_SELF)
        started = time.perf_counter()
        streams = await asyncio.gather(*(go(prompt) for prompt in workload.prompts(name, seed)))
        wall = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _summary(name, seed, streams, wall, cpu)


def _summary(name: str, seed: int, streams: list[Stream], wall: float, client_cpu: float) -> dict[str, Any]:
    good = [s for s in streams if not s.error]
    output = sum(s.completion_tokens for s in good)
    prompt = sum(s.prompt_tokens for s in good)
    ttft = [s.ttft if s.ttft is not None else s.e2e for s in good]
    gaps = [gap for s in good for gap in s.gaps]
    tpot = [(s.e2e - (s.ttft or 0)) / max(1, s.completion_tokens - 1) for s in good]
    return {
        "workload": name,
        "seed": seed,
        "ok": len(good),
        "errors": [s.error for s in streams if s.error][:2],
        "wall_s": wall,
        "out_tok": output,
        "out_tok_s": output / wall,
        "total_tok_s": (output + prompt) / wall,
        "cached_tok": sum(s.cached_tokens for s in good),
        "ttft_p50_ms": percentile(ttft, 0.5) * 1e3,
        "ttft_p99_ms": percentile(ttft, 0.99) * 1e3,
        "itl_p50_ms": percentile(gaps, 0.5) * 1e3,
        "itl_p99_ms": percentile(gaps, 0.99) * 1e3,
        "tpot_p50_ms": percentile(tpot, 0.5) * 1e3,
        "e2e_p50_ms": percentile([s.e2e for s in good], 0.5) * 1e3,
        "client_cpu_s": client_cpu,
    }
