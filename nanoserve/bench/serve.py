"""`python -m nanoserve.bench.serve`: the workloads W1-W6 against one or several running servers.

With several `--server NAME=URL` the rounds are interleaved (A B A B ...), because the machine's memory bandwidth
drifts by more than most differences: compare figures of one invocation only. Prints one table row per server and
workload with median (min..max) over the rounds, and writes every round as JSON lines when asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from nanoserve import bench
from nanoserve.bench.client import WORKLOADS, run_workload
from nanoserve.bench.stats import spread

_DEFAULT = ("nanoserve", "http://127.0.0.1:8000")
_COLUMNS = ("out_tok_s", "total_tok_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tpot_p50_ms")


def _named_url(text: str) -> tuple[str, str]:
    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL, such as {'='.join(_DEFAULT)}")
    return name, url.rstrip("/")


def arguments(argv: list[str]) -> argparse.Namespace:
    """What `run` takes; ends the process, as argparse does, where a flag is wrong."""
    parser = bench.parser("serve", __doc__)
    parser.add_argument(
        "--server",
        action="append",
        type=_named_url,
        metavar="NAME=URL",
        help=f"base URL of a running server; may be repeated; default: {'='.join(_DEFAULT)}",
    )
    parser.add_argument("--model", default="", help="model name to send; default: the server's first")
    parser.add_argument("--workload", action="append", choices=sorted(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each workload")
    parser.add_argument("--warmup", type=int, default=1, help="rounds of each workload that are thrown away")
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds before each round, for the last server to rest"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round; each round adds one")
    parser.add_argument("--extra", type=json.loads, default={}, help="JSON object merged into each request body")
    parser.add_argument("--out", type=Path, help="file for one JSON line per round")
    return parser.parse_args(argv)


class NoServer(Exception):
    """One line: what was asked, and what came instead of a list of models."""


async def _model_of(base_url: str, asked: str) -> str:
    """`asked`, or what the server calls its first model. NoServer where none answers, or something else does."""
    import aiohttp

    url, timeout = f"{base_url}/v1/models", aiohttp.ClientTimeout(total=30)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url) as response:
            if asked:
                return asked
            if response.status != 200:
                raise NoServer(f"{url} answered {response.status}: is the server ready?")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ContentTypeError, LookupError, TypeError, ValueError) as error:
        raise NoServer(f"{url} does not answer as an OpenAI server's does") from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise NoServer(f"no server at {base_url}: {str(error) or 'no answer'}") from error


async def _main(args: argparse.Namespace) -> int:
    servers = dict(args.server or [_DEFAULT])
    models = {name: await _model_of(url, args.model) for name, url in servers.items()}
    failures = 0
    print(f"| server | workload | runs | {' | '.join(_COLUMNS)} |\n|{'---|' * (3 + len(_COLUMNS))}")
    for workload in args.workload or sorted(WORKLOADS):
        results: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for round_index in range(-args.warmup, args.rounds):
            for name, url in servers.items():
                seed = args.seed + args.warmup + round_index
                await asyncio.sleep(args.settle)
                result = await run_workload(f"{url}/v1/completions", models[name], workload, seed, args.extra)
                failures += len(result["errors"])
                for error in result["errors"]:
                    print(f"{name} {workload}: {error}", file=sys.stderr)
                if round_index >= 0:
                    results[name].append(result)
                    if args.out:
                        with args.out.open("a") as out:
                            out.write(json.dumps({"server": name} | result) + "\n")
        for name, rounds in results.items():
            cells = " | ".join(spread([r[column] for r in rounds]) for column in _COLUMNS)
            print(f"| {name} | {workload} | {len(rounds)} | {cells} |", flush=True)
    return 1 if failures else 0


def run(args: argparse.Namespace) -> None:
    """Measures, prints the table and ends the process: 1 where a request failed, one line where a server is missing."""
    try:
        sys.exit(asyncio.run(_main(args)))
    except NoServer as error:
        sys.exit(f"bench serve: {error}")


def main() -> None:
    run(arguments(sys.argv[1:]))


if __name__ == "__main__":
    main()
