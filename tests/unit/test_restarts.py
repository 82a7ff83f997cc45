"""How often and how soon a process is started again."""

from __future__ import annotations

import pytest

from nanoserve.restarts import WINDOW_S, RestartBudget, RestartPlan


def test_the_first_restart_is_immediate_and_the_next_wait_longer() -> None:
    budget = RestartBudget(5)
    waits = [budget.spend("engine-0", now) for now in (0.0, 1.0, 2.0, 3.0, 4.0)]
    assert waits == [0.0, 0.25, 0.5, 1.0, 2.0]
    assert budget.spend("engine-0", 5.0) is None


@pytest.mark.rule(4)
def test_each_process_has_its_own_budget() -> None:
    budget = RestartBudget(1)
    assert budget.spend("engine-0", 0.0) == 0.0
    assert budget.spend("detok-0", 0.0) == 0.0
    assert budget.spend("engine-0", 0.0) is None


def test_old_restarts_are_forgotten() -> None:
    budget = RestartBudget(2)
    assert [budget.spend("a-0", now) for now in (0.0, 10.0)] == [0.0, 0.25]
    assert budget.spend("a-0", WINDOW_S - 1) is None
    assert budget.spend("a-0", WINDOW_S + 1) is not None
    assert budget.spend("a-0", WINDOW_S + 2) is None


def test_a_process_that_has_lived_is_restarted_at_once() -> None:
    budget = RestartBudget(10)
    assert [budget.spend("a-0", now, 60.0) for now in range(3)] == [0.0, 0.0, 0.0]
    assert [budget.spend("a-0", now, 0.9) for now in range(3)] == [0.0, 0.25, 0.5]
    assert budget.spend("a-0", 4.0, 1.1) == 0.0


def test_no_wait_is_longer_than_ten_seconds_however_many() -> None:
    budget = RestartBudget(10_000)
    assert max(budget.spend("a-0", now / 100) or 0.0 for now in range(5000)) == 10.0


def test_a_budget_of_zero_allows_none() -> None:
    assert RestartBudget(0).spend("a-0", 0.0) is None


def test_the_plan_says_what_is_due_and_how_long_to_sleep() -> None:
    plan = RestartPlan(3)
    assert plan.patience_ms(0.0, 500) in (500, 501)
    assert plan.add("a-0", 0.0) == 0.0
    assert plan.patience_ms(0.0, 500) == 1
    assert plan.take_due(0.0) == ["a-0"] and plan.take_due(0.0) == []
    assert plan.add("a-0", 1.0) == 0.25
    assert plan.take_due(1.2) == []
    assert 200 <= plan.patience_ms(1.0, 500) <= 251
    assert plan.take_due(1.25) == ["a-0"]
    assert plan.add("a-0", 2.0) == 0.5
    plan.clear()
    assert plan.take_due(9.0) == []
