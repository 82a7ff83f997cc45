"""What a process uses: memory, file descriptors, CPU, and how late its event loop runs. One line a minute.

Owner: each process, from its pulse thread (`nanoserve.child`); `LoopLag` belongs to the api process's loop.
"""

from __future__ import annotations

import psutil

LINE_S = 60.0


class ProcessUsage:
    """Samples this process. CPU is the share of one core since the last sample."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()

    def line(self) -> str:
        with self._process.oneshot():
            rss = self._process.memory_info().rss
            return (
                f"rss {rss / (1 << 20):.0f} MiB, fds {self._process.num_fds()}, "
                f"threads {self._process.num_threads()}, cpu {self._process.cpu_percent():.1f} %"
            )


class LoopLag:
    """How late the timer of an event loop comes: time is a parameter, the loop tells it after each sleep."""

    def __init__(self, begun_s: float) -> None:
        self.last_s = 0.0
        self._worst_s = 0.0
        self._line_due_s = begun_s + LINE_S

    def note(self, late_s: float, now_s: float) -> float | None:
        """Takes one delay; once a minute returns the worst of that minute, for the log."""
        self.last_s = max(late_s, 0.0)
        self._worst_s = max(self._worst_s, self.last_s)
        if now_s < self._line_due_s:
            return None
        worst_s, self._worst_s = self._worst_s, 0.0
        self._line_due_s = now_s + LINE_S
        return worst_s
