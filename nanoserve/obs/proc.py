"""What a process uses: memory, file descriptors, CPU, and how late its event loop runs. One line a minute.

Owner: each process, from its pulse thread (`nanoserve.child`); `LoopLag` and `StopProbe` belong to the loop of api.
"""

from __future__ import annotations

import os

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


class StopProbe:
    """Tells whether a process is stopped by a signal or a debugger. Asking takes some microseconds."""

    def __init__(self, pid: int) -> None:
        self._fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)

    def is_stopped(self) -> bool:
        try:
            status = os.pread(self._fd, 512, 0)
        except OSError:  # it has ended
            return False
        return status[status.rindex(b")") + 2 :][:1] in (b"T", b"t")


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
