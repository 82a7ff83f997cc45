"""Objects with sensible fields, so that a test names only what it is about."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import msgspec

from nanoserve.engine.core import EngineCore, MemoryInbox
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import AddRequest, SamplingParams, TextSpec
from nanoserve.sched.admission import SchedulerLimits
from nanoserve.sched.plan import Executor
from nanoserve.sched.request import Request, StepOutput
from nanoserve.sched.scheduler import Scheduler
from tests.fakes import FakeExecutor

EOS = 1


def make_clock(start: int = 1) -> Callable[[], int]:
    """A clock that advances by a nanosecond a look."""
    ticks = count(start)
    return lambda: next(ticks)


def make_sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **fields})


def make_request(
    request_id: int, prompt: Iterable[int] = (5, 6, 7), *, output: Iterable[int] = (), **fields: Any
) -> Request:
    """Fields of `Request` by name; all others go into its sampling parameters."""
    own = {name: fields.pop(name) for name in ("priority", "cache_salt", "arrival_ns") if name in fields}
    prompt, output = list(prompt), list(output)
    return Request(request_id, prompt + output, len(prompt), make_sampling(**fields), **own)


def make_limits(**fields: Any) -> SchedulerLimits:
    defaults: dict[str, Any] = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_num_queued": 100,
        "max_model_len": 256,
        "num_blocks": 64,
        "block_size": 4,
        "vocab_size": 100,
    }
    return SchedulerLimits(**{**defaults, **fields})


def make_scheduler(*, eos: Iterable[int] = (EOS,), **limits: Any) -> Scheduler:
    return Scheduler(make_limits(**limits), tuple(eos))


def make_add_request(
    request_id: int, prompt: Iterable[int] = (5, 6, 7), *, output: Iterable[int] = (), **fields: Any
) -> AddRequest:
    names = ("priority", "cache_salt", "arrival_ns", "share_key", "num_siblings")
    own = {name: fields.pop(name) for name in names if name in fields}
    spec = msgspec.msgpack.encode(TextSpec(prompt_tail=tuple(prompt)))
    return AddRequest(
        request_id, pack_ids(prompt), make_sampling(**fields), spec, output_token_ids=pack_ids(output), **own
    )


def make_core(
    executor: Executor | None = None, *, eos: Iterable[int] = (EOS,), began_ns: int = 1, **limits: Any
) -> EngineCore:
    scheduler = make_scheduler(eos=eos, **limits)
    executor = executor or FakeExecutor(scheduler.limits.block_size, scheduler.limits.vocab_size)
    return EngineCore(scheduler, executor, MemoryInbox(), engine_index=0, incarnation=1, clock=make_clock(began_ns))


def run_step(scheduler: Scheduler, executor: Executor, now_ns: int = 1) -> StepOutput:
    """One whole step, with the books checked after it."""
    plan = scheduler.schedule(now_ns)
    scheduler.check_invariants()
    output = scheduler.update(plan, executor.execute(plan), now_ns)
    scheduler.check_invariants()
    return output


def run_to_end(scheduler: Scheduler, executor: Executor, max_steps: int = 10_000) -> StepOutput:
    """Steps until nothing is left to do; all that they gave."""
    total = StepOutput()
    for _ in range(max_steps):
        if not scheduler.has_work:
            return total
        output = run_step(scheduler, executor)
        total.rows += output.rows
        total.prompt_scores += output.prompt_scores
        total.finished += output.finished
    raise AssertionError(f"still at work after {max_steps} steps")
