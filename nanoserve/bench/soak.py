"""`python -m nanoserve.bench.soak --minutes 60`: mixed load for long, and what it does to memory and descriptors.

Starts a server of its own. A third of the requests are streams that are left in the middle, a third are left before
their first token, the rest are read to the end. Every ten seconds each process's anonymous memory (with what is swapped
out) and open descriptors are read; told is the slope of the second half, where caches have reached their size, by the
hour and by the request: what grows with requests grows as much when they come faster, so that a short run of many
stands for the hour in which a server at `--rate` would see as many.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from nanoserve import bench
from nanoserve.bench.chaos import Server

_SAMPLE_S = 10.0
_WORDS = ("sun", "rain", "Zürich", "熊", "🐻", "naïve", "ကြိုဆို", "of", "the", "under", "seven", "bridges")


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    anonymous_bytes: int
    descriptors: int
    cpu_s: float
    num_requests: int  # that had ended by then


def sample(pid: int, at_s: float, num_requests: int) -> Sample:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    kib = int(fields["RssAnon"].split()[0]) + int(fields["VmSwap"].split()[0])
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    cpu_s = (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return Sample(at_s, kib << 10, sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()), cpu_s, num_requests)


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
            if options.rate:
                await asyncio.sleep(draw.expovariate(options.rate / options.clients))
            await _one(session, server.url, draw)
            count += 1

    pids = {**server.pids, "launcher": server.pid}
    samples: dict[str, list[Sample]] = {name: [] for name in pids}
    try:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
            clients = [asyncio.create_task(client(number)) for number in range(options.clients)]
            while time.monotonic() < ends:
                await asyncio.sleep(min(_SAMPLE_S, options.minutes * 60 / 12))
                for name, pid in pids.items():
                    samples[name].append(sample(pid, time.monotonic() - begun, count))
            await asyncio.gather(*clients)
    finally:
        code = await server.stop()
    sys.stdout.write(f"{count} requests in {time.monotonic() - begun:.0f} s, exit code {code}\n")
    return samples


def main() -> int:
    parser = bench.parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.0, help="requests a second in all; 0: as fast as they go")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("server_args", nargs="*", help="after --: flags of launch_server", default=["sim"])
    options = parser.parse_args()
    for name, entries in asyncio.run(measure(options)).items():
        first, last = entries[len(entries) // 2], entries[-1]
        growth = slope(entries[len(entries) // 2 :])
        by_request = growth * (last.at_s - first.at_s) / max(last.num_requests - first.num_requests, 1)
        sys.stdout.write(
            f"{name:10} {first.anonymous_bytes >> 20:5} MiB -> {last.anonymous_bytes >> 20:5} MiB, slope "
            f"{growth * 3600 / (1 << 20):+.1f} MiB an hour, {by_request:+.0f} bytes a request, "
            f"fds {first.descriptors} -> {last.descriptors}, CPU {last.cpu_s / last.at_s:.1%}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
