"""`python -m nanoserve.bench.api_cpu`: CPU time of the api process per streamed token, and frames it can write.

Starts a server of its own (`--model`: the sim model, or a real one) and a client that holds `--streams` streams open in
this process; a round is a window of `--seconds` in the middle of those streams. Told are microseconds of CPU (all
threads of the api process, from /proc/PID/task/*/schedstat) per token that clients were sent, each round and their
spread, and how many frames a second of the api's CPU time writes. CPU time, not wall time, so a busy machine disturbs
it little, but its caches and its clock still count: look at the spread. `--step-ms 0`: the sim as fast as it goes.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import aiohttp
import uvloop

from nanoserve import bench
from nanoserve.bench.chaos import Server

_TICKS = os.sysconf("SC_CLK_TCK")
_SIM = ("--max-num-seqs", "256", "--sim-output", "random")
_FRAME = b"data: {"
_END = b"\r\n0\r\n\r\n"  # the last chunk of an answer


@dataclass(frozen=True, slots=True)
class Reading:
    """What one process and its clients have counted so far."""

    cpu_s: float
    system_s: float
    tokens: int
    frames: int
    at_s: float


def cpu_seconds(pid: int) -> tuple[float, float]:
    """All of one process so far, and the part of it in the kernel (in clock ticks, so only roughly)."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    nanoseconds = sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads)
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return nanoseconds / 1e9, int(fields[12]) / _TICKS


class Client(asyncio.Protocol):
    """One connection that streams answer after answer; it counts frames and parses nothing: that would cost CPU."""

    def __init__(self, request: bytes) -> None:
        self.num_frames = 0
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._tail = b""
        self._begins = True
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are none of asyncio's classes
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._begins:
            self._begins = False
            if not data.startswith(b"HTTP/1.1 200"):
                self.failed.set_exception(SystemExit(data.decode(errors="replace")))
        # what may be the beginning of a frame or of the end is looked at again, and is too short to count twice
        data = self._tail + data
        self.num_frames += data.count(_FRAME)
        self._tail = data[-len(_FRAME) + 1 :]
        if data.endswith(_END) and self._transport is not None:
            self._begins = True
            self._transport.write(self._request)

    def drop(self) -> None:
        """Ends it in the middle of its stream."""
        self.failed.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.failed.done():
            self.failed.set_exception(exc or SystemExit("the server closed a connection"))


async def open_streams(url: str, path: str, num_streams: int, max_tokens: int) -> list[Client]:
    """Connections that keep a stream open each, until they are dropped."""
    address = urlsplit(url)
    loop = asyncio.get_running_loop()
    clients = []
    for number in range(num_streams):
        body = {"stream": True, "max_tokens": max_tokens, "ignore_eos": True, "seed": number} | (
            {"messages": [{"role": "user", "content": "Tell me a story."}]}
            if "chat" in path
            else {"prompt": "Once upon a time"}
        )
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        )
        make = partial(Client, head.encode() + b"\r\n\r\n" + content)
        _, client = await loop.create_connection(make, address.hostname or "", address.port or 80)
        clients.append(client)
    return clients


async def _tokens(session: aiohttp.ClientSession, server: Server) -> int:
    """Made by the engine so far."""
    async with session.get(server.url + "/server_info") as response:
        return int(json.loads(await response.read())["engine_stats"]["generation_tokens"])


def _read(server: Server, clients: Sequence[Client], tokens: int) -> Reading:
    cpu_s, system_s = cpu_seconds(server.pids["api-0"])
    return Reading(cpu_s, system_s, tokens, sum(client.num_frames for client in clients), time.monotonic())


def _round(before: Reading, after: Reading) -> dict[str, float]:
    tokens = max(after.tokens - before.tokens, 1)
    frames = after.frames - before.frames
    cpu_s, wall_s = after.cpu_s - before.cpu_s, after.at_s - before.at_s
    return {
        "us_per_token": cpu_s * 1e6 / tokens,
        "us_system": (after.system_s - before.system_s) * 1e6 / tokens,
        "tokens_per_s": tokens / wall_s,
        "frames_per_s": frames / wall_s,
        "frames_per_cpu_s": frames / cpu_s,
        "api_cpu_share": cpu_s / wall_s,
    }


async def measure(options: argparse.Namespace) -> list[dict[str, float]]:
    sim = [*_SIM, "--sim-step-ms", str(options.step_ms)] if options.model == "sim" else []
    server = await Server.start([options.model, *sim, *options.server_args])
    rounds: list[dict[str, float]] = []
    clients: list[Client] = []
    try:
        clients = await open_streams(server.url, options.path, options.streams, options.max_tokens)
        async with aiohttp.ClientSession() as session:
            await asyncio.sleep(options.warm_up)
            for _ in range(options.rounds):
                before = _read(server, clients, await _tokens(session, server))
                await asyncio.sleep(options.seconds)
                after = _read(server, clients, 0)  # before the next question, which costs CPU as well
                after = replace(after, tokens=await _tokens(session, server))
                for client in clients:
                    if client.failed.done():
                        client.failed.result()
                rounds.append(_round(before, after))
    finally:
        for client in clients:
            client.drop()
        await server.stop()
    return rounds


def report(rounds: Sequence[dict[str, float]], streams: int) -> str:
    lines = [
        f"round {number}: {one['us_per_token']:.1f} us/token ({one['us_system']:.1f} of them in the kernel), "
        f"{one['tokens_per_s']:.0f} tokens/s, {one['frames_per_s']:.0f} frames/s, "
        f"{one['frames_per_cpu_s']:.0f} frames per CPU second, api at {one['api_cpu_share']:.0%} of a core"
        for number, one in enumerate(rounds, start=1)
    ]
    figures = [one["us_per_token"] for one in rounds]
    lines.append(
        f"{streams} streams, {len(rounds)} rounds: median {statistics.median(figures):.1f} us/token, "
        f"lowest {min(figures):.1f}, highest {max(figures):.1f}"
    )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = bench.parser("api-cpu", __doc__)
    parser.add_argument("--model", default="sim", help="as for launch_server")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one step of the sim model")
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm-up", type=float, default=3.0, help="seconds before the first round")
    parser.add_argument("--max-tokens", type=int, default=1500, help="of each answer; then the next one begins")
    parser.add_argument("--path", default="/v1/completions", help="/v1/completions or /v1/chat/completions")
    parser.add_argument("server_args", nargs="*", help="after --: more flags of launch_server")
    options = parser.parse_args()
    sys.stdout.write(report(uvloop.run(measure(options)), options.streams))
    return 0


if __name__ == "__main__":
    sys.exit(main())
