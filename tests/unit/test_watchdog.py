"""The watchdog: progress, declared waiting, declared long steps, stalls, and native code that holds the lock."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanoserve.obs.watchdog import EXIT_WATCHDOG, LoopWatchdog


class Bench:
    """A watchdog under a clock of its own."""

    def __init__(self, path: Path, soft_s: float, hard_s: float) -> None:
        self.ended: list[int] = []
        self.dog = LoopWatchdog("engine-0", path, soft_s=soft_s, hard_s=hard_s, end=self.ended.append)
        self._path = path

    @property
    def dumps(self) -> int:
        return self._path.read_text().count("stacks of all threads")

    @property
    def text(self) -> str:
        return self._path.read_text()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "w.log", 10, 100)
    yield bench
    bench.dog.close()


def test_a_loop_that_turns_is_left_alone(bench: Bench) -> None:
    for now in range(0, 1000, 5):
        bench.dog.feed()
        assert bench.dog.check(now) == 0
    assert bench.dumps == 0 and not bench.ended


def test_waiting_is_not_a_stall_and_the_time_waited_does_not_count(bench: Bench) -> None:
    bench.dog.check(0)
    with bench.dog.idle():
        for now in range(0, 500, 50):
            assert bench.dog.check(now) == 0
    assert bench.dog.check(509) == 0
    assert bench.dog.check(518.9) == pytest.approx(9.9)
    assert bench.dumps == 0


@pytest.mark.rule(78)
def test_a_stall_is_dumped_once_and_named(bench: Bench) -> None:
    bench.dog.feed()
    for now in (0, 9.9, 10, 11, 50):
        bench.dog.check(now)
    assert bench.dumps == 1
    assert "engine-0: no progress for 10.0 s" in bench.text
    assert "test_a_stall_is_dumped_once_and_named" in bench.text  # our own stack


def test_each_new_stall_is_dumped_again(bench: Bench) -> None:
    for start in (0, 20):
        bench.dog.feed()
        bench.dog.check(start)
        bench.dog.check(start + 12)
    assert bench.dumps == 2


@pytest.mark.rule(78)
def test_the_hard_limit_ends_the_process(bench: Bench) -> None:
    bench.dog.check(0)
    bench.dog.check(99)
    assert not bench.ended
    bench.dog.check(100)
    assert bench.ended == [EXIT_WATCHDOG]


@pytest.mark.rule(78)
def test_a_declared_long_step_is_no_alarm_until_its_own_limit(bench: Bench) -> None:
    with bench.dog.busy("step 7: 1 rows, 32768 tokens", 60):
        assert bench.dog.check(0) == 0
        assert bench.dog.check(59) == 0
        assert bench.dumps == 0
        assert bench.dog.check(61) == pytest.approx(1)
        assert bench.dumps == 1 and "32768 tokens" in bench.text
        bench.dog.check(159)
        assert not bench.ended
        bench.dog.check(160)
        assert bench.ended == [EXIT_WATCHDOG]


def test_a_short_declared_step_has_the_usual_soft_limit(bench: Bench) -> None:
    with bench.dog.busy("step", 1):
        bench.dog.check(0)
        assert bench.dog.check(5) == pytest.approx(4)
        assert bench.dumps == 0
        bench.dog.check(10)
        assert bench.dumps == 1


def test_the_end_of_a_long_step_is_progress(bench: Bench) -> None:
    with bench.dog.busy("step", 60):
        bench.dog.check(0)
        bench.dog.check(50)
    assert bench.dog.doing is None
    assert bench.dog.check(55) == 0
    bench.dog.check(64)
    assert bench.dumps == 0


def test_limits_of_zero_are_off(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "w.log", 0, 0)
    bench.dog.check(0)
    bench.dog.check(1e6)
    assert bench.dumps == 0 and not bench.ended
    bench.dog.close()


def test_native_code_that_holds_the_lock_is_seen_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No Python thread can run then: only the C timer is left to write the stacks."""
    monkeypatch.setattr("nanoserve.obs.watchdog._TIMER_MARGIN_S", 0.0)
    bench = Bench(tmp_path / "w.log", 0.2, 0)
    bench.dog.check(time.monotonic())
    ctypes.PyDLL(None).usleep(600_000)  # PyDLL keeps the interpreter lock, CDLL would release it
    text = bench.text
    bench.dog.close()
    assert "Timeout" in text and "test_native_code_that_holds_the_lock_is_seen_too" in text


def test_sigusr1_writes_all_stacks(bench: Bench) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert "test_sigusr1_writes_all_stacks" in bench.text


def test_native_frames_are_added_where_py_spy_is(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "native frames of $4"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    bench.dog.check(0)
    bench.dog.check(11)
    assert f"native frames of {os.getpid()}" in bench.text


def test_a_big_file_is_put_aside_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    path.write_text("old line\n" * 1_000_000)
    Bench(path, 1, 2).dog.close()
    assert path.stat().st_size < 1000 and (tmp_path / "w.log.1").stat().st_size > 8 << 20
