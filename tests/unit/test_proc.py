"""Usage lines and event-loop lag."""

from __future__ import annotations

import re

from nanoserve.obs.proc import LoopLag, ProcessUsage


def test_the_usage_line_has_memory_descriptors_threads_and_cpu() -> None:
    assert re.fullmatch(r"rss \d+ MiB, fds \d+, threads \d+, cpu [\d.]+ %", ProcessUsage().line())


def test_the_worst_delay_of_a_minute_is_told_once() -> None:
    lag = LoopLag(0.0)
    told = [lag.note(late, now) for late, now in ((0.01, 10.0), (0.4, 30.0), (-0.001, 59.0), (0.02, 60.0))]
    assert told == [None, None, None, 0.4]
    assert lag.last_s == 0.02
    assert [lag.note(0.03, now) for now in (61.0, 119.0, 120.0)] == [None, None, 0.03]
