"""One line of log for a step that took long, with the likely reason. Owner: the engine process, around each step.

The reasons are told apart by what the operating system counted meanwhile: pages read back from disk (the machine
swaps, or the weights were not in memory yet), and the CPU time that the step got for its time on the wall.
"""

from __future__ import annotations

import logging
import resource
import time

from nanoserve.sched.plan import Executor, StepPlan, StepResult

_log = logging.getLogger(__name__)

_QUIET_S = 10.0  # at most one line in this time
_MANY_FAULTS = 100
_LONG_PREFILL_TOKENS = 256
_STARVED_SHARE = 0.5


class SlowStepLog:
    """Passes plans on. `slow_s` 0 switches it off."""

    def __init__(self, executor: Executor, slow_s: float) -> None:
        self._executor = executor
        self._slow_s = slow_s
        self._quiet_until = 0.0
        self._not_told = 0

    def execute(self, plan: StepPlan) -> StepResult:
        before, begun = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        result = self._executor.execute(plan)
        ended = time.monotonic()
        if self._slow_s and ended - begun >= self._slow_s:
            self._tell(plan, before, begun, ended)
        return result

    def _tell(self, plan: StepPlan, before: resource.struct_rusage, begun: float, ended: float) -> None:
        if ended < self._quiet_until:
            self._not_told += 1
            return
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        reason = slow_reason(plan, after.ru_majflt - before.ru_majflt, cpu_s, ended - begun)
        num_tokens = sum(row.num_tokens for row in plan.rows)
        untold = f" ({self._not_told} more since the last line)" if self._not_told else ""
        _log.warning(
            "step %d took %.1f s: %d rows, %d tokens; %s%s",
            plan.step, ended - begun, len(plan.rows), num_tokens, reason, untold,
        )  # fmt: skip
        self._quiet_until, self._not_told = ended + _QUIET_S, 0

    def close(self) -> None:
        self._executor.close()


def slow_reason(plan: StepPlan, major_faults: int, cpu_s: float, wall_s: float) -> str:
    """The likeliest cause, worst first."""
    if major_faults > _MANY_FAULTS:
        return f"memory was read back from disk ({major_faults} page faults)"
    if cpu_s < _STARVED_SHARE * wall_s:
        return f"it got {cpu_s:.1f} s of CPU: other work on this machine, or a wait for the device"
    longest = max((row.num_tokens for row in plan.rows), default=0)
    if longest >= _LONG_PREFILL_TOKENS:
        return f"a long prompt ({longest} tokens of one request)"
    return "computing"
