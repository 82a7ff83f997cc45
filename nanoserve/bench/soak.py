"""`python -m nanoserve.bench.soak --minutes 60`: mixed load for long, and what it does to memory and descriptors.

Starts a server of its own. A third of the requests are streams that are left in the middle, a third are left before
their first token, the rest are read to the end. Every ten seconds each process's anonymous memory (with what is swapped
out) and open descriptors are read; told is the slope of the second half, where caches have reached their size.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from nanoserve.bench.chaos import Server

_SAMPLE_S = 10.0
_WORDS = ("sun", "rain", "Zürich", "熊", "🐻", "naïve", "ကြိုဆို", "of", "the", "under", "seven", "bridges")


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    anonymous_bytes: int
    descriptors: int


def sample(pid: int, at_s: float) -> Sample:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    kib = int(fields["RssAnon"].split()[0]) + int(fields["VmSwap"].split()[0])
    return Sample(at_s, kib << 10, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))


def slope(samples: Sequence[Sample]) -> float:
    """Least-squares growth of memory in bytes per second."""
    if len(samples) < 2:
        return 0.0
    middle = sum(entry.at_s for entry in samples) / len(samples)
    mean = sum(entry.anonymous_bytes for entry in samples) / len(samples)
    spread = sum((entry.at_s - middle) ** 2 for entry in samples)
    return sum((entry.at_s - middle) * (entry.anonymous_bytes - mean) for entry in samples) / spread


async def _one(session: aiohttp.ClientSession, url: str, draw: random.Random) -> None:
    fate = draw.randrange(3)
    prompt = " ".join(draw.choices(_WORDS, k=draw.randrange(1, 200)))
    body = {"prompt": prompt, "max_tokens": draw.randrange(1, 200), "stream": True, "ignore_eos": True}
    if fate == 0:  # hang up before the first token
        try:
            await asyncio.wait_for(session.post(f"{url}/v1/completions", json=body), draw.uniform(0.0, 0.01))
        except TimeoutError:
            return
        return
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status == 503:
            await asyncio.sleep(0.1)
            return
        response.raise_for_status()
        left = draw.randrange(1, 40) if fate == 1 else None
        async for _ in response.content:
            if left is not None:
                left -= 1
                if left == 0:
                    response.close()
                    return


async def measure(options: argparse.Namespace) -> dict[str, list[Sample]]:
    server = await Server.start(options.server_args)
    begun = time.monotonic()
    ends = begun + options.minutes * 60
    count = 0

    async def client(number: int) -> None:
        nonlocal count
        draw = random.Random(f"{options.seed}-{number}")
        while time.monotonic() < ends:
            await _one(session, server.url, draw)
            count += 1

    samples: dict[str, list[Sample]] = {name: [] for name in server.pids}
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            clients = [asyncio.create_task(client(number)) for number in range(options.clients)]
            while time.monotonic() < ends:
                await asyncio.sleep(min(_SAMPLE_S, options.minutes * 60 / 12))
                for name, pid in server.pids.items():
                    samples[name].append(sample(pid, time.monotonic() - begun))
            await asyncio.gather(*clients)
    finally:
        code = await server.stop()
    sys.stdout.write(f"{count} requests in {time.monotonic() - begun:.0f} s, exit code {code}\n")
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m nanoserve.bench.soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("server_args", nargs="*", help="after --: flags of launch_server", default=["sim"])
    options = parser.parse_args()
    for name, entries in asyncio.run(measure(options)).items():
        half = entries[len(entries) // 2 :]
        sys.stdout.write(
            f"{name:10} {half[0].anonymous_bytes >> 20:5} MiB -> {half[-1].anonymous_bytes >> 20:5} MiB, slope "
            f"{slope(half) * 3600 / (1 << 20):+.1f} MiB an hour, fds {half[0].descriptors} -> {half[-1].descriptors}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
