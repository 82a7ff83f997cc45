"""Processes that are stopped or stuck, as the supervisor sees them: from their pulse alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanoserve.children import READY, RESTARTING, STALLED, STARTING, Child, child_environment
from nanoserve.ipc.messages import Heartbeat
from nanoserve.wakeups import ChildTable, Wakeups


def make_table() -> tuple[ChildTable, Child, Wakeups]:
    wakeups = Wakeups()
    table = ChildTable(wakeups)
    child = Child("engine", 0, 1, 4711, Path("engine-0.log"), state=READY, heard=100.0)
    table.add(child)
    return table, child, wakeups


@pytest.mark.rule(77)
def test_a_process_without_a_pulse_is_stalled_within_two_seconds_and_well_again_with_the_next() -> None:
    table, child, wakeups = make_table()
    assert not table.check_pulses(101.5, 0)  # a pulse comes each half second; one or two may be late
    assert table.check_pulses(101.8, 0) and child.state == STALLED
    child.heard = 102.0
    assert table.check_pulses(102.1, 0) and child.state == READY
    wakeups.close()


@pytest.mark.rule(77)
def test_a_loop_that_is_later_than_it_said_is_stalled_though_its_process_beats() -> None:
    """Told by the third pulse after it was stuck: one still saw progress, the next are half a second apart."""
    table, child, wakeups = make_table()
    for late_s, state in ((0.5, READY), (1.01, STALLED), (0.0, READY)):
        child.hear(Heartbeat("engine-0", 1, late_s=late_s))
        table.check_pulses(100.1, 0)
        assert child.state == state
    wakeups.close()


def test_what_stays_silent_for_good_is_ended_once() -> None:
    table, child, wakeups = make_table()
    table.check_pulses(130.0, 20.0)
    assert child.condemned
    wakeups.close()


def test_a_later_life_that_hangs_in_its_start_is_ended_too() -> None:
    """Stopped before its first pulse, or beating and never ready; the first start has a limit of its own."""
    for state, now, startup_s, is_ended in (
        (RESTARTING, 125.0, 60.0, False),
        (RESTARTING, 131.0, 60.0, True),
        (RESTARTING, 110.0, 9.0, True),
        (STARTING, 131.0, 9.0, False),
    ):
        table, child, wakeups = make_table()
        child.state, child.started_ns = state, 100_000_000_000
        table.check_pulses(now, 20.0, startup_s)
        assert child.condemned == is_ended
        wakeups.close()


def test_only_the_engine_gets_a_pool_of_threads_and_it_spins_briefly() -> None:
    """What the operator set about spinning stays."""
    engine, api = child_environment("engine", 3, {}), child_environment("api", 3, {})
    assert (engine["OMP_NUM_THREADS"], api["OMP_NUM_THREADS"]) == ("3", "1")
    assert engine["GOMP_SPINCOUNT"] == "10000" and "GOMP_SPINCOUNT" not in api
    assert child_environment("engine", 3, {"GOMP_SPINCOUNT": "7"})["GOMP_SPINCOUNT"] == "7"
    assert "GOMP_SPINCOUNT" not in child_environment("engine", 3, {"OMP_WAIT_POLICY": "ACTIVE"})
