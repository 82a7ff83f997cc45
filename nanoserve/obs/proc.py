"""What a process uses: memory, file descriptors, CPU, and how late its event loop runs. One line a minute.

Owner: each process, from its pulse thread (`nanoserve.child`); the api process runs `LoopLag.run` as a task.
"""

from __future__ import annotations

import asyncio
import time

import psutil

from nanoserve.ipc.link import Watchdog


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
    """Feeds a watchdog from an asyncio loop and remembers the worst delay of its own timer."""

    def __init__(self, interval_s: float = 0.5) -> None:
        self.worst_s = 0.0
        self.last_s = 0.0
        self._interval_s = interval_s

    async def run(self, watchdog: Watchdog) -> None:
        """Runs until cancelled. A loop that hangs stops feeding; that is the whole check."""
        while True:
            watchdog.feed()
            before = time.monotonic()
            await asyncio.sleep(self._interval_s)
            self.last_s = max(time.monotonic() - before - self._interval_s, 0.0)
            self.worst_s = max(self.worst_s, self.last_s)

    def take_worst(self) -> float:
        worst, self.worst_s = self.worst_s, 0.0
        return worst
