"""`POST /start_profile`: the next steps as a Chrome trace, stage by stage, for a trace viewer.

Owner: the engine process. `serve` tells it what messages have asked for and gives it a step to run while a profile
runs; all other steps pass by.
Format: Trace Event Format of Chrome (also read by Perfetto), complete events `X` in microseconds of CLOCK_MONOTONIC.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from nanoserve.engine.core import EngineCore
from nanoserve.engine.stats import EngineCounters
from nanoserve.ipc.messages import TokenBatch
from nanoserve.sched.plan import Executor, StepPlan, StepResult, StepTimes

_log = logging.getLogger(__name__)


class ProfiledStep(NamedTuple):
    """When one step went from stage to stage, in ns, and what was in it."""

    shape: dict[str, int]
    begin_ns: int
    executed_ns: tuple[int, int]  # from and to, as the executor's caller saw it
    times: StepTimes  # of the stages inside, which follow each other
    updated_ns: int
    sent_ns: int


class StepProfiler:
    """An executor that remembers the steps it is asked to. At the end of a profile a thread writes its file."""

    def __init__(self, executor: Executor, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._executor = executor
        self._clock = clock
        self._is_recording = False
        self._executed: tuple[dict[str, int], tuple[int, int], StepTimes] | None = None
        self._profile = 0  # number of the last one that was begun
        self._file: Path | None = None  # of the one that runs
        self._records: list[ProfiledStep] = []
        self._writer: threading.Thread | None = None

    def execute(self, plan: StepPlan) -> StepResult:
        if not self._is_recording:
            return self._executor.execute(plan)
        begin_ns = self._clock()
        result = self._executor.execute(plan)
        self._executed = (shape_of(plan), (begin_ns, self._clock()), result.times)
        return result

    def follow(self, counters: EngineCounters) -> None:
        """Begins and ends profiles as messages have asked for, and as their steps are over."""
        if counters.profile != self._profile:
            self._end()
            self._profile, self._file = counters.profile, Path(counters.profile_file)
        if not counters.profile_steps_left:
            self._end()

    def step(self, core: EngineCore, send: Callable[[TokenBatch | None], None]) -> None:
        """Runs and sends one step of a profile; the last one ends it. A step that failed is left out."""
        counters = core.counters
        counters.profile_steps_left -= 1  # before the step, whose stats tell of it; in it the next one may be asked for
        self._is_recording, self._executed = True, None
        begin_ns = self._clock()
        batch = core.step()
        updated_ns = self._clock()
        send(batch)
        sent_ns = self._clock()
        self._is_recording = False
        if self._executed is not None:
            shape, executed_ns, times = self._executed
            self._records.append(ProfiledStep(shape, begin_ns, executed_ns, times, updated_ns, sent_ns))
        self.follow(counters)

    def _end(self) -> None:
        """The profile that runs, if one does, becomes a file."""
        if self._file is None:
            return
        self._wait_for_writer()
        work = (self._records, self._file)
        self._records, self._file = [], None
        self._writer = threading.Thread(target=write_trace, args=work, name="profile", daemon=True)
        self._writer.start()

    def _wait_for_writer(self) -> None:
        if self._writer is not None:
            self._writer.join()

    def close(self) -> None:
        self._wait_for_writer()
        self._executor.close()


def shape_of(plan: StepPlan) -> dict[str, int]:
    """What a step computes. A row that adds one token to its request counts as decoding, also at a prompt's end."""
    decoding = [row for row in plan.rows if row.samples and row.num_tokens == 1 + len(row.draft_token_ids)]
    num_tokens = sum(row.num_tokens for row in plan.rows)
    num_drafts = sum(len(row.draft_token_ids) for row in plan.rows)
    return {
        "step": plan.step,
        "rows": len(plan.rows),
        "decode_rows": len(decoding),
        "prompt_tokens": num_tokens - num_drafts - len(decoding),
        "draft_tokens": num_drafts,
        "new_requests": len(plan.new_requests),
        "longest_context": max((row.start + row.num_tokens for row in plan.rows), default=0),
    }


def write_trace(records: list[ProfiledStep], path: Path) -> None:
    """Writes the file, whole or not at all; a disk that is full costs the profile, never the engine."""
    pid = os.getpid()
    name = {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": "engine"}}
    events = [name, *(event for record in records for event in step_events(record, pid))]
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        _log.warning("the profile could not be written: %s", error)
        return
    _log.info("profile of %d steps: %s", len(records), path)


def step_events(record: ProfiledStep, pid: int) -> list[dict[str, Any]]:
    """The step, its stages one after the other inside it, and its batch as a curve."""
    from_ns, to_ns = record.executed_ns
    times = record.times
    built_ns = min(from_ns + int(times.build_seconds * 1e9), to_ns)
    forwarded_ns = min(built_ns + int(times.forward_seconds * 1e9), to_ns)
    sampled_ns = min(forwarded_ns + int(times.sample_seconds * 1e9), to_ns)
    stages = (
        ("step", record.begin_ns, record.sent_ns),
        ("schedule", record.begin_ns, from_ns),
        ("build", from_ns, built_ns),
        ("forward", built_ns, forwarded_ns),
        ("sample", forwarded_ns, sampled_ns),
        ("update", to_ns, record.updated_ns),
        ("send", record.updated_ns, record.sent_ns),
    )
    events: list[dict[str, Any]] = [
        {"name": name, "ph": "X", "ts": begin / 1e3, "dur": (end - begin) / 1e3, "pid": pid, "tid": 1}
        for name, begin, end in stages
    ]
    events[0]["args"] = record.shape
    curve = {key: record.shape[key] for key in ("decode_rows", "prompt_tokens", "draft_tokens")}
    events.append({"name": "batch", "ph": "C", "ts": record.begin_ns / 1e3, "pid": pid, "args": curve})
    return events
