"""Faults of single steps, for tests: see `nanoserve.obs.faults`. Loaded only when `--fault` is given."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

from nanoserve.obs.faults import STEP_ACTIONS, Fault
from nanoserve.sched.plan import Executor, RowError, StepPlan, StepResult


class FaultyExecutor:
    """Passes plans on, and breaks those that it was told to break."""

    def __init__(self, executor: Executor, faults: Iterable[Fault]) -> None:
        self._executor = executor
        self._faults = [fault for fault in faults if fault.action in STEP_ACTIONS]
        self._poisoned: set[int] = set()

    def execute(self, plan: StepPlan) -> StepResult:
        result: StepResult | None = None
        for fault in self._faults:
            if fault.action == "poison":
                self._die_of_poison(plan, int(fault.value))
            elif fault.turn == plan.step and fault.action == "fail-step":
                raise RuntimeError("a fault on purpose")
            elif fault.turn == plan.step and fault.action == "nan":
                result = _without_first_row(self._executor.execute(plan))
                result.errors.append(RowError(plan.rows[0].request_id, "the model's output is not a number"))
        return self._executor.execute(plan) if result is None else result

    def _die_of_poison(self, plan: StepPlan, token_id: int) -> None:
        self._poisoned.update(new.request_id for new in plan.new_requests if token_id in new.token_ids)
        if any(row.request_id in self._poisoned for row in plan.rows):
            os.kill(os.getpid(), signal.SIGSEGV)

    def close(self) -> None:
        self._executor.close()


def _without_first_row(result: StepResult) -> StepResult:
    dropped = result.num_tokens[0]
    return StepResult(
        num_tokens=[0, *result.num_tokens[1:]],
        token_ids=result.token_ids[dropped:],
        scores=result.scores,
        prompt_scores=result.prompt_scores,
        errors=list(result.errors),
        times=result.times,
    )
