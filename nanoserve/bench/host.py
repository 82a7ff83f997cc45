"""What the engine does around a forward pass, stage by stage: `python -m nanoserve.bench.host`.

The engine's own loop in one process, over its sockets and with a real model, whose passes leave the caches as cold as
they are in a server. Only steps are counted in which each of the rows decodes one token. The kinds of a number of rows
take turns, so that a machine that changes from minute to minute meets all of them alike.

`host` is all of a step but the greedy requests' forward pass: what a draw adds to a pass counts, wherever it is done.
Medians over the steps of a round, then the median of the rounds with their range, in microseconds.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import zmq

from nanoserve import bench
from nanoserve.bench.stats import spread
from nanoserve.config import ServerConfig
from nanoserve.engine.core import EngineCore
from nanoserve.engine.process import WatchedExecutor, load_executor, scheduler_limits
from nanoserve.engine.slow_steps import SlowStepLog
from nanoserve.engine.suspects import RecordingExecutor, StepRecord, SuspectInbox, Suspects
from nanoserve.hub.resolve import prepare
from nanoserve.ipc.channels import Inbox, Outbox
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.endpoints import Endpoints
from nanoserve.ipc.messages import AddRequest, EngineInbox, Release, SamplingParams, TokenBatch
from nanoserve.obs.watchdog import LoopWatchdog
from nanoserve.sched.plan import Executor, StepPlan, StepResult
from nanoserve.sched.scheduler import Scheduler

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8},
    "top-p": {"temperature": 0.8, "top_p": 0.95},
    "penalty": {"temperature": 0.8, "repetition_penalty": 1.1},
}
STAGES = ("schedule", "build", "forward", "sample", "watchers", "update", "send", "receive")
_WARM_UP_STEPS = 4
Times = dict[str, float]  # seconds by stage, and of the whole `step`


class TimedExecutor:
    """Remembers the last step: when it began and ended, its rows, and its inner stages."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.began = self.ended = 0.0
        self.times: Times = {}
        self.decoding_rows = 0  # of a step in which every row computes one token; else 0

    def execute(self, plan: StepPlan) -> StepResult:
        self.began = time.perf_counter()
        result = self._executor.execute(plan)
        self.ended = time.perf_counter()
        times = result.times
        self.times = {"build": times.build_seconds, "forward": times.forward_seconds, "sample": times.sample_seconds}
        self.times["watchers"] = self.ended - self.began - sum(self.times.values())
        self.decoding_rows = len(plan.rows) if all(row.num_tokens == 1 for row in plan.rows) else 0
        return result

    def close(self) -> None:
        self._executor.close()


class EngineLoop:
    """`engine.process.serve` with a clock in it; the process's sockets end in this one."""

    def __init__(self, config: ServerConfig, run_dir: Path) -> None:
        model_dir = prepare(config, lambda stage, part: None)
        executor, facts, _ = load_executor(config, model_dir, lambda stage, part: None)
        endpoints = Endpoints(run_dir=run_dir)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._detok: Inbox[TokenBatch] = Inbox(context, endpoints.detok(), TokenBatch)
        self._outbox = Outbox(context, endpoints.detok())
        suspects = Suspects(StepRecord(endpoints.step_record()), endpoints.strikes())
        self._inbox = SuspectInbox(Inbox(context, endpoints.engine(), EngineInbox), suspects)
        self._api = Outbox(context, endpoints.engine())
        self._watchdog = LoopWatchdog("bench", run_dir / "watchdog.log", soft_s=0, hard_s=0)
        watched = WatchedExecutor(SlowStepLog(executor, config.obs.slow_step), self._watchdog)
        self._timed = TimedExecutor(RecordingExecutor(watched, suspects))
        scheduler = Scheduler(scheduler_limits(config.scheduler, facts))
        self._core = EngineCore(
            scheduler, self._timed, self._inbox, engine_index=0, incarnation=0, clock=time.monotonic_ns
        )
        self._vocab_size = facts.vocab_size
        self._num_requests = 0

    def run(self, rows: int, context: int, steps: int, sampling: dict[str, Any]) -> list[Times]:
        """Decodes `steps` tokens of that many requests; the times of the steps with all of them."""
        random = np.random.default_rng(self._num_requests)
        request_ids = range(self._num_requests, self._num_requests + rows)
        self._num_requests += rows
        for request_id in request_ids:
            params = SamplingParams(max_tokens=steps, ignore_eos=True, seed=request_id, **sampling)
            length = context + request_id % rows  # blocks are full, and become findable, at some rows in each step
            prompt = random.integers(0, self._vocab_size, length).tolist()
            self._api.send(AddRequest(request_id, pack_ids(prompt), params, b""))
        while self._core.scheduler.num_running + self._core.scheduler.num_waiting < rows:
            self._inbox.wait(100)
            self._core.receive()
        times = []
        while self._core.scheduler.has_work:
            times.append(self._turn())
        self._core.handle(Release(list(request_ids)))
        self._detok.drain()
        full = [turn for turn in times if turn.pop("rows") == rows]
        return full[_WARM_UP_STEPS:]

    def _turn(self) -> Times:
        begun = time.perf_counter()
        self._watchdog.feed()
        self._core.receive()
        if (news := self._core.take_news()) is not None:
            self._outbox.send(news)
        received = time.perf_counter()
        batch = self._core.step()
        stepped = time.perf_counter()
        if batch is not None:
            self._outbox.send(batch)
        sent = time.perf_counter()
        return {
            "receive": received - begun,
            "schedule": self._timed.began - received,
            **self._timed.times,
            "update": stepped - self._timed.ended,
            "send": sent - stepped,
            "step": sent - begun,
            "rows": self._timed.decoding_rows,
        }


def report(rows: int, rounds: dict[str, list[Times]]) -> None:
    """A line for each kind; `rounds` has the medians of each of its rounds."""
    for kind, turns in rounds.items():
        passes = [turn["forward"] for turn in rounds.get("greedy", turns)]
        host = [turn["step"] - forward for turn, forward in zip(turns, passes, strict=True)]
        shares = [100 * part / turn["step"] for part, turn in zip(host, turns, strict=True)]
        cells = "  ".join(f"{stage} {median(turn[stage] for turn in turns) * 1e6:.0f}" for stage in STAGES)
        sys.stdout.write(
            f"{rows:3d} rows {kind:8s} step {spread([turn['step'] * 1e6 for turn in turns], 0):20s}  host "
            f"{spread([part * 1e6 for part in host], 0):18s} {spread(shares):16s} %   {cells}\n"
        )
        sys.stdout.flush()


def main() -> None:
    parser = bench.parser("host", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=["greedy", "sampled"])
    parser.add_argument("--context", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=100, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = ServerConfig()
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, model=args.model, max_model_len=2048),
        scheduler=dataclasses.replace(config.scheduler, speculative_num_tokens=0),
    )
    with tempfile.TemporaryDirectory(prefix="nanoserve-bench-") as run_dir:
        loop = EngineLoop(config, Path(run_dir))
        for rows in args.rows:
            rounds: dict[str, list[Times]] = defaultdict(list)
            for _ in range(args.rounds):
                for kind in args.kind:
                    times = loop.run(rows, args.context, args.steps, KINDS[kind])
                    rounds[kind].append({name: median(turn[name] for turn in times) for name in times[0]})
            report(rows, rounds)


if __name__ == "__main__":
    main()
