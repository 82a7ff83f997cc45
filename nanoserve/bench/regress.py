"""`python -m nanoserve.bench.regress`: nanoserve alone, and whether it has become slower.

A time means nothing on a machine that is a tenth slower in the next minute. So before each round a calibration runs,
a matrix product on all cores, and the figure that is kept is throughput divided by its speed. `--save` writes these
ratios to docs/bench-last.json; without it they are compared with that file, and a workload below `--tolerance` of its
last ratio makes the exit code 1. Ratios of another kind of machine say nothing here: then nothing is compared.

Why not memory bandwidth for few streams: with weights of 4 bits a step of one row takes 8 % longer when the memory
gives 48 instead of 78 GB/s (bench.steps), so dividing by it would add more than it takes away.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from nanoserve import bench
from nanoserve.bench.client import WORKLOADS, run_workload
from nanoserve.bench.peers import ROOT, ours, running
from nanoserve.bench.stats import percentile, spread

LAST = Path("docs/bench-last.json")
_MATRIX = 1024
_CALIBRATION_S = 0.5  # five products, 45 ms, could all fall into a moment when both threads share a core


def multiply_gflops() -> float:
    """Giga-operations a second of a float32 matrix product, the best of half a second."""
    a = np.ones((_MATRIX, _MATRIX), np.float32)
    return 2 * _MATRIX**3 / 1e9 / _best(lambda: a @ a)


def _best(call: Callable[[], object]) -> float:
    times, end = [], time.perf_counter() + _CALIBRATION_S
    while (began := time.perf_counter()) < end:
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def machine() -> str:
    """The kind of machine, for which ratios hold: the CPU's name, family and model, and how many CPUs we may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in reversed(lines))  # of several CPUs the first one's words stay
    facts = {key.strip(): value.strip() for key, _, value in pairs}
    name, family, model = (facts.get(key, "-") for key in ("model name", "cpu family", "model"))
    return f"{name}, family {family} model {model}, {len(os.sched_getaffinity(0))} CPUs"


def last_ratios(file: Path, here: str) -> dict[str, float]:
    """What `--save` kept in `file` on this kind of machine; of another kind nothing, and a word on stderr."""
    kept = json.loads(file.read_text()) if file.exists() else {}
    there = kept.pop("machine", "a machine that has no name")
    if kept and there != here:
        kinds = f"{there}; this is {here}"
        print(f"{file} is of another kind of machine ({kinds}): nothing is compared; see --save", file=sys.stderr)
        return {}
    return kept


def measure(url: str, model: str, name: str, rounds: int) -> dict[str, Any]:
    """Throughputs of one workload and each round's ratio to the calibration loop that ran just before it."""
    rates, ratios = [], []
    asyncio.run(run_workload(f"{url}/v1/completions", model, name, 0))
    for seed in range(1, rounds + 1):
        calibration = multiply_gflops()
        result = asyncio.run(run_workload(f"{url}/v1/completions", model, name, seed))
        if result["errors"]:
            raise RuntimeError(f"{name}: {result['errors'][0]}")
        rates.append(result["out_tok_s"])
        ratios.append(result["out_tok_s"] / calibration)
    return {"out_tok_s": spread(rates), "ratios": ratios, "ratio": percentile(ratios, 0.5)}


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = bench.parser("regress", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--flags",
        default="--speculative-num-tokens 0",  # what drafts gain depends on the text of the round
        help="further flags of launch_server, in one string",
    )
    parser.add_argument("--workload", action="append", choices=sorted(WORKLOADS), help="may be repeated; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tolerance", type=float, default=0.85, help="least share of the last ratio that is no loss")
    parser.add_argument("--save", action="store_true", help=f"keep the ratios in {LAST}")
    return parser.parse_args(argv)


def main() -> int:
    args = _arguments(sys.argv[1:])
    here = machine()
    last = last_ratios(LAST, here)
    (server,) = ours(args.model, [f"nanoserve:{args.flags}"], 8100)
    ratios: dict[str, float] = {}
    slower = []
    print("| workload | out tok/s | to calibration | last | share of last |\n|---|---|---|---|---|")
    with running(server, ROOT / "logs"):
        for name in args.workload or sorted(WORKLOADS):
            found = measure(server.url, args.model, name, args.rounds)
            ratios[name] = round(found["ratio"], 4)
            compared = ["-", "-"]
            if name in last:
                share = found["ratio"] / last[name]
                compared = [str(last[name]), f"{share:.2f}"]
                if share < args.tolerance:
                    slower.append(name)
            cells = [name, found["out_tok_s"], spread(found["ratios"], 2), *compared]
            print(f"| {' | '.join(cells)} |", flush=True)
    if args.save:
        LAST.write_text(json.dumps({"machine": here} | last | ratios, indent=1) + "\n")
    elif slower:
        print(f"slower than the last figures: {', '.join(slower)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
