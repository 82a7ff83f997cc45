"""`python -m nanoserve.bench.chaos_peer`: vLLM under load, its engine process killed, and what its clients see.

The counterpart of `nanoserve.bench.chaos` for a server that restarts nothing. vLLM is installed and started as for
`nanoserve.bench.peers`. Told are how each stream ended, what /health said, and when and how the server ended.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp

from nanoserve import bench
from nanoserve.bench.chaos import Stream, run_stream
from nanoserve.bench.peers import ROOT, Peer, peers

_TITLE = b"VLLM::EngineCore"
_START_S = 240.0
_WATCH_S = 30.0


def engine_pids() -> list[int]:
    """The processes that call themselves vLLM's engine core."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(_TITLE):
                found.append(int(entry.name))
    return found


async def _status(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            return str(response.status)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return type(error).__name__


def _outcome(stream: Stream) -> str:
    """How a client saw its stream end."""
    end = "with [DONE]" if stream.is_done else "without [DONE]"
    return f"error {stream.error[:160]}, {end}" if stream.error else f"no error, {end}"


async def measure(peer: Peer, options: argparse.Namespace) -> None:
    log = (ROOT / "logs" / "chaos-vllm.log").open("wb")
    process = await asyncio.create_subprocess_exec(
        *peer.command, stdout=log, stderr=log, env=os.environ | peer.env, start_new_session=True
    )
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            ends = time.monotonic() + _START_S
            while await _status(session, f"{peer.url}/health") != "200":
                if time.monotonic() > ends or process.returncode is not None:
                    raise RuntimeError("vLLM did not become healthy; see its log")
                await asyncio.sleep(0.5)
            await _kill_under_load(session, peer, process, options)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        log.close()


async def _kill_under_load(
    session: aiohttp.ClientSession, peer: Peer, process: asyncio.subprocess.Process, options: argparse.Namespace
) -> None:
    model = peer.command[2]
    common = {"model": model, "max_tokens": options.tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    bodies = [{"prompt": f"Story {number}: once upon a time", **common} for number in range(options.streams)]
    streams = [asyncio.create_task(run_stream(session, peer.url, body)) for body in bodies]
    await asyncio.sleep(options.after)
    victims = engine_pids()
    killed = time.monotonic()
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    health = []
    while process.returncode is None and time.monotonic() - killed < _WATCH_S:
        health.append(f"{time.monotonic() - killed:.1f} s {await _status(session, f'{peer.url}/health')}")
        await asyncio.sleep(0.5)
    ended_s = time.monotonic() - killed
    ended = await asyncio.wait_for(asyncio.gather(*streams), _WATCH_S)
    sys.stdout.write(f"{peer.name}: {len(victims)} engine process killed under {len(bodies)} streams\n")
    for outcome, count in collections.Counter(map(_outcome, ended)).items():
        sys.stdout.write(f"{count} streams: {outcome}\n")
    lengths = sorted(max(len(stream.times) - 1, 0) for stream in ended)
    sys.stdout.write(f"events before the end: {lengths[0]} to {lengths[-1]} of {options.tokens}\n")
    sys.stdout.write(f"/health: {', '.join(health) or 'not asked'}\n")
    state = "still runs" if process.returncode is None else f"ended with exit code {process.returncode}"
    sys.stdout.write(
        f"{ended_s:.1f} s after the kill the server {state}; /health {await _status(session, f'{peer.url}/health')}\n"
    )


def main() -> int:
    parser = bench.parser("chaos-peer", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--after", type=float, default=3.0, help="seconds of load before the kill")
    options = parser.parse_args()
    (peer,) = peers(ROOT, options.model, ["vllm"], len(os.sched_getaffinity(0)))
    asyncio.run(measure(peer, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
