"""`python -m nanoserve.bench.chaos`: streams run while processes are killed; every text must be the undisturbed one.

Starts a server of its own. After one undisturbed round come rounds in each of which the detokenizer, the engine, or
both get SIGKILL at a random moment; then one in which each process, the api's too, is stopped (SIGSTOP) for some
seconds. Told are lost and wrong streams, bytes that are missing or too many, and the pause: the longest gap that a
stream saw after the signal. Greedy, so that texts can be compared. During the undisturbed round /health is asked all
the time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from nanoserve import bench
from nanoserve.bench.stats import percentile

VICTIMS = (("detok-0",), ("engine-0",), ("detok-0", "engine-0"))
_WORDS = ("the bear", "a river", "Zürich", "熊", "🐻", "and then", "ကြိုဆို", "slowly", "日本", "café", "of light", "under")


@dataclass(slots=True)
class Stream:
    text: str = ""
    is_done: bool = False
    error: str = ""
    times: list[float] = field(default_factory=list)

    def pause(self, killed: float) -> float:
        """The longest gap between events that begins before or soon after the kill; 0 for a stream that was over."""
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False) if after > killed]
        return max(gaps, default=0.0)


class Server:
    """The launcher under test, with the pids of the newest lives of its processes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.url = ""
        self.pids: dict[str, int] = {}
        self._process = process
        self._ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, args: Sequence[str]) -> Server:
        command = [sys.executable, "-m", "nanoserve.launch_server", "--port", "0", "--max-restarts", "100000", *args]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        server = cls(process)
        await asyncio.wait_for(server._ready.wait(), 600)
        return server

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for raw in self._process.stdout:
            line = raw.decode("utf-8", "replace")
            if match := re.search(r"listening on (\S+)", line):
                self.url = match.group(1)
            if "  pids: " in line:
                self.pids.update((name, int(pid)) for name, pid in re.findall(r"(\w+-\d+) (\d+)", line))
                self._ready.set()
            if match := re.match(r"(\w+-\d+) \(pid (\d+)\) is back", line):
                self.pids[match.group(1)] = int(match.group(2))

    @property
    def pid(self) -> int:
        """The launcher's."""
        return self._process.pid

    def signal(self, names: Sequence[str], number: int) -> None:
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[name], number)

    async def stop(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        code = await self._process.wait()
        await self._reader
        return code


async def run_stream(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Stream:
    stream = Stream()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                stream.times.append(time.monotonic())
                if line.startswith(b"data: [DONE]"):
                    stream.is_done = True
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    stream.error = str(event["error"])
                else:
                    stream.text += "".join(choice["text"] for choice in event["choices"])
    except (aiohttp.ClientError, OSError) as error:
        stream.error = repr(error)
    return stream


async def run_round(
    session: aiohttp.ClientSession,
    server: Server,
    bodies: list[dict[str, Any]],
    victims: Sequence[str],
    after_s: float,
    stop_s: float = 0.0,
) -> tuple[list[Stream], float]:
    """All streams at once; `after_s` later the victims are killed, or stopped for `stop_s`.

    Returns the streams and the moment of the signal.
    """
    tasks = [asyncio.create_task(run_stream(session, server.url, body)) for body in bodies]
    killed = time.monotonic()
    if victims:
        await asyncio.sleep(after_s)
        killed = time.monotonic()
        server.signal(victims, signal.SIGSTOP if stop_s else signal.SIGKILL)
        if stop_s:
            await asyncio.sleep(stop_s)
            server.signal(victims, signal.SIGCONT)
    return list(await asyncio.gather(*tasks)), killed


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    draw = random.Random(options.seed)
    prompts = [" ".join(draw.choices(_WORDS, k=12)) for _ in range(options.streams)]
    common = {"max_tokens": options.tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    bodies = [{"prompt": prompt, **common} for prompt in prompts]
    server = await Server.start(options.server_args)
    results = []
    timeout, connector = aiohttp.ClientTimeout(total=None, sock_read=300), aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            await run_round(session, server, bodies, (), 0)  # warm
            begun = time.monotonic()
            asking = asyncio.create_task(_ask_health(server.url))
            right, _ = await run_round(session, server, bodies, (), 0)
            undisturbed_s = time.monotonic() - begun
            asking.cancel()
            sys.stdout.write(await asking + "\n")
            rounds = [(VICTIMS[number % len(VICTIMS)], 0.0) for number in range(options.rounds)]
            if options.stop_seconds:
                rounds += [((name,), options.stop_seconds) for name in server.pids]
            for victims, stop_s in rounds:
                after_s = draw.uniform(0.1, 0.8) * undisturbed_s
                streams, killed = await run_round(session, server, bodies, victims, after_s, stop_s)
                results.append(_judge(streams, right, victims, killed, "stopped" if stop_s else "killed"))
                shown = {key: value for key, value in results[-1].items() if key != "pauses"}
                sys.stdout.write(json.dumps(shown) + "\n")
                sys.stdout.flush()
                await asyncio.sleep(options.rest)
    finally:
        code = await server.stop()
    sys.stdout.write(f"undisturbed round {undisturbed_s:.2f} s, server ended with exit code {code}\n")
    return results


async def _ask_health(url: str) -> str:
    """Asks as a prober would, ten times a second, until it is cancelled; returns what it saw."""
    times: list[float] = []
    statuses: set[int] = set()
    with contextlib.suppress(asyncio.CancelledError):
        async with aiohttp.ClientSession() as session:
            while True:
                begun = time.monotonic()
                async with session.get(f"{url}/health") as response:
                    statuses.add(response.status)
                times.append((time.monotonic() - begun) * 1000)
                await asyncio.sleep(0.1)
    worst = f"p50 {percentile(times, 0.5):.1f}, p99 {percentile(times, 0.99):.1f}, max {max(times):.1f} ms"
    return f"/health under load, {len(times)} times: {worst}, status {sorted(statuses)}"


def _judge(
    streams: list[Stream], right: list[Stream], victims: Sequence[str], killed: float, what: str
) -> dict[str, Any]:
    pauses = [pause for stream in streams if (pause := stream.pause(killed)) > 0]
    surplus = [
        len(stream.text.encode()) - len(other.text.encode()) for stream, other in zip(streams, right, strict=True)
    ]
    return {
        what: "+".join(victims),
        "streams": len(streams),
        "lost": sum(not stream.is_done or bool(stream.error) for stream in streams),
        "wrong": sum(stream.text != other.text for stream, other in zip(streams, right, strict=True)),
        "bytes_missing": -sum(min(number, 0) for number in surplus),
        "bytes_too_many": sum(max(number, 0) for number in surplus),
        "live_at_kill": len(pauses),
        "pause_p50_s": round(percentile(pauses, 0.5), 3) if pauses else None,
        "pause_max_s": round(max(pauses), 3) if pauses else None,
        "pauses": pauses,
    }


def main() -> int:
    parser = bench.parser("chaos", __doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stop-seconds", type=float, default=5.0, help="how long each process is stopped; 0: none is")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds between rounds, so that a standby can start")
    parser.add_argument("server_args", nargs="*", help="after --: flags of launch_server", default=["sim"])
    options = parser.parse_args()
    results = asyncio.run(measure(options))
    _summarize(results)
    return 1 if any(result["lost"] or result["wrong"] for result in results) else 0


def _summarize(results: list[dict[str, Any]]) -> None:
    for victims in VICTIMS:
        mine = [result["pauses"] for result in results if result.get("killed") == "+".join(victims)]
        pauses = [pause for of_round in mine for pause in of_round]
        if pauses:
            spread = f"median {percentile(pauses, 0.5):.2f} s, worst {max(pauses):.2f} s"
            sys.stdout.write(f"{'+'.join(victims):18} {len(mine)} rounds, pause of {len(pauses)} streams: {spread}\n")
    keys = ("streams", "lost", "wrong", "bytes_missing", "bytes_too_many")
    totals = {key: sum(result[key] for result in results) for key in keys}
    sys.stdout.write(f"{len(results)} rounds: {', '.join(f'{key} {value}' for key, value in totals.items())}\n")


if __name__ == "__main__":
    sys.exit(main())
