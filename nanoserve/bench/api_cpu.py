"""`python -m nanoserve.bench.api_cpu`: CPU time of the api process per streamed token.

Starts a sim server of its own and a client that holds `--streams` chat streams open in a process of its own; a round is
a window of `--seconds` in the middle of those streams. Told are microseconds of CPU (user and system, from
/proc/PID/stat) of the api process per token that clients were sent, each round and their spread. CPU time, not wall
time, so a busy machine disturbs it little, but its caches and its clock still count: look at the spread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from nanoserve.bench.chaos import Server

_TICKS = os.sysconf("SC_CLK_TCK")
_SERVER = ("sim", "--max-num-seqs", "256", "--sim-output", "random")


def cpu_seconds(pid: int) -> tuple[float, float]:
    """User and system time of one process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / _TICKS, int(fields[12]) / _TICKS


class Clients:
    """Open streams, and how many events with content came over all of them."""

    def __init__(self, url: str, num_streams: int, path: str) -> None:
        self.num_tokens = 0
        self.num_frames = 0
        self._url = url + path
        self._num_streams = num_streams
        self._is_chat = "chat" in path

    async def run(self) -> None:
        """Keeps every stream open, with a new request when one has ended; ends by cancellation."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            await asyncio.gather(*(self._stream(session, number) for number in range(self._num_streams)))

    async def _stream(self, session: aiohttp.ClientSession, number: int) -> None:
        body: dict[str, object] = {"stream": True, "max_tokens": 1500, "ignore_eos": True, "seed": number}
        body |= {"messages": [{"role": "user", "content": "hi"}]} if self._is_chat else {"prompt": "hi"}
        while True:
            async with session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise SystemExit(f"{response.status}: {await response.text()}")
                async for chunk in response.content.iter_any():
                    self.num_frames += chunk.count(b"data: {")


async def _generated(session: aiohttp.ClientSession, url: str) -> int:
    """Tokens that the engine has made so far."""
    async with session.get(url + "/server_info") as response:
        return int(json.loads(await response.read())["engine_stats"]["generation_tokens"])


async def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    args = [*_SERVER, "--sim-step-ms", str(options.step_ms), *options.server_args]
    server = await Server.start(args)
    rounds: list[dict[str, float]] = []
    try:
        clients = Clients(server.url, options.streams, options.path)
        load = asyncio.create_task(clients.run())
        pid = server.pids["api-0"]
        async with aiohttp.ClientSession() as session:
            await asyncio.sleep(options.warm_up)
            for _ in range(options.rounds):
                if load.done():
                    load.result()
                before = *cpu_seconds(pid), await _generated(session, server.url), clients.num_frames, time.monotonic()
                await asyncio.sleep(options.seconds)
                after = *cpu_seconds(pid), await _generated(session, server.url), clients.num_frames, time.monotonic()
                user_s, system_s, tokens, frames, wall_s = (b - a for a, b in zip(before, after, strict=True))
                cpu_s = user_s + system_s
                rounds.append(
                    {
                        "us_system": system_s * 1e6 / max(tokens, 1),
                        "us_per_token": cpu_s * 1e6 / max(tokens, 1),
                        "tokens_per_s": tokens / wall_s,
                        "frames_per_token": frames / max(tokens, 1),
                        "api_cpu_share": cpu_s / wall_s,
                    }
                )
        load.cancel()
    finally:
        await server.stop()
    return rounds


def report(rounds: Sequence[dict[str, float]], streams: int) -> str:
    lines = [
        f"round {number}: {one['us_per_token']:.1f} us/token ({one['us_system']:.1f} of them in the kernel), "
        f"{one['tokens_per_s']:.0f} tokens/s, {one['frames_per_token']:.2f} frames a token, "
        f"api at {one['api_cpu_share']:.0%} of a core"
        for number, one in enumerate(rounds, start=1)
    ]
    figures = [one["us_per_token"] for one in rounds]
    middle = statistics.median(figures)
    lines.append(
        f"{streams} streams, {len(rounds)} rounds: median {middle:.1f} us/token, "
        f"lowest {min(figures):.1f}, highest {max(figures):.1f}"
    )
    return "\n".join(lines) + "\n"


def main() -> int:
    words = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m nanoserve.bench.api_cpu", description=words)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one step of the sim model")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before the first round")
    parser.add_argument("--path", default="/v1/completions", help="/v1/completions or /v1/chat/completions")
    parser.add_argument("server_args", nargs="*", help="after --: more flags of launch_server")
    options = parser.parse_args()
    sys.stdout.write(report(asyncio.run(measure(options)), options.streams))
    return 0


if __name__ == "__main__":
    sys.exit(main())
