"""Steps that take long are logged with a reason, and not too often."""

from __future__ import annotations

import logging
import time

import pytest

from nanoserve.engine.slow_steps import SlowStepLog, slow_reason
from nanoserve.sched.plan import PlanRow, StepPlan, StepResult


def plan(*num_tokens: int) -> StepPlan:
    return StepPlan(7, [], [PlanRow(number, 0, tokens, [], True) for number, tokens in enumerate(num_tokens)], [])


class Sleeper:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def execute(self, plan: StepPlan) -> StepResult:
        time.sleep(self.seconds)
        return StepResult([], [])

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("rows", "faults", "cpu_s", "words"),
    [
        ((1, 1), 5000, 2.0, "read back from disk"),
        ((1, 1), 0, 0.3, "other work"),
        ((1, 512), 0, 3.5, "512 tokens of one request"),
        ((1, 1), 0, 3.5, "computing"),
        ((), 0, 3.5, "computing"),
    ],
)
def test_reasons(rows: tuple[int, ...], faults: int, cpu_s: float, words: str) -> None:
    assert words in slow_reason(plan(*rows), faults, cpu_s, 2.0)


def test_one_line_for_slow_steps_and_none_for_quick_ones(caplog: pytest.LogCaptureFixture) -> None:
    executor = Sleeper(0.02)
    log = SlowStepLog(executor, 0.01)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.execute(plan(1, 30))
        executor.seconds = 0.0
        log.execute(plan(1))
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("step 7 took 0.0 s: 2 rows, 31 tokens; it got")


def test_zero_is_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        SlowStepLog(Sleeper(0.01), 0.0).execute(plan(1))
    assert not caplog.messages
