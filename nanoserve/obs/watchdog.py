"""Progress of one loop: a stall writes all stacks to `<process>.watchdog.log`, a long one ends the process.

Owner: each child has one, fed by its loop and checked by its pulse thread (`nanoserve.child`). Two mechanisms, because
one cannot see everything: the pulse thread compares counters and knows what the loop was doing, and a C timer of
`faulthandler`, which that thread puts off again and again, fires when native code holds the interpreter lock so long
that no Python thread runs.
For a process that is stopped or locked up for good, the supervisor sees its heartbeats stop. The launchers have no such
loop to watch, but a `StackFile` too: SIGUSR1 writes the stacks of any process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

_log = logging.getLogger(__name__)

EXIT_WATCHDOG = 71
_MAX_BYTES = 8 << 20  # past it a new life of the process begins a new file
_SPY_TIMEOUT_S = 10.0
_TIMER_MARGIN_S = 2.0  # the C timer waits longer than the pulse thread, which can say more


class StackFile:
    """`<process>.watchdog.log`: SIGUSR1 writes the stacks of all threads there, and the process goes on.

    OSError when the file cannot be opened. One per process: a second one takes the signal over.
    """

    def __init__(self, path: Path, about: str) -> None:
        if path.exists() and path.stat().st_size > _MAX_BYTES:
            path.replace(path.with_name(path.name + ".1"))
        self.file = path.open("a", buffering=1, encoding="utf-8")
        self.write(f"{about}; SIGUSR1 writes all stacks here")
        faulthandler.register(signal.SIGUSR1, file=self.file, all_threads=True, chain=False)

    def write(self, text: str) -> None:
        try:
            self.file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
        except OSError:
            _log.warning("the watchdog log cannot be written")

    def close(self) -> None:
        """From then on the signal ends the process again, as the system has it."""
        faulthandler.unregister(signal.SIGUSR1)
        self.file.close()


class _Idle:
    """Reusable, so that a loop allocates nothing per turn."""

    def __init__(self, owner: LoopWatchdog) -> None:
        self._owner = owner

    def __enter__(self) -> None:
        self._owner.idle_depth += 1

    def __exit__(self, *_: object) -> None:
        self._owner.idle_depth -= 1
        self._owner.count += 1


class _Busy:
    def __init__(self, owner: LoopWatchdog, what: str, limit_s: float) -> None:
        self._owner = owner
        self._doing = (what, limit_s)
        self._outer = owner.doing

    def __enter__(self) -> None:
        self._outer = self._owner.doing
        self._owner.doing = self._doing
        self._owner.count += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._owner.doing = self._outer
        self._owner.count += 1


class LoopWatchdog:
    """Implements `nanoserve.ipc.link.Watchdog`. `soft_s` and `hard_s` of 0 switch that mode off.

    The loop touches only `count`, `idle_depth` and `doing`; all else belongs to the thread that calls `check`.
    """

    def __init__(
        self, name: str, path: Path, *, soft_s: float, hard_s: float, end: Callable[[int], object] = os._exit
    ) -> None:
        self.count = 0
        self.idle_depth = 0
        self.doing: tuple[str, float] | None = None
        self._name = name
        self._limits = (soft_s, hard_s)
        self._end = end
        self._idle = _Idle(self)
        self._seen = -1
        self._since = 0.0
        self._dumped = False
        self._stacks = StackFile(path, f"watching {name}: soft limit {soft_s:g} s, hard limit {hard_s:g} s")

    def feed(self) -> None:
        self.count += 1

    def idle(self) -> AbstractContextManager[None]:
        return self._idle

    def busy(self, what: str, limit_s: float) -> AbstractContextManager[None]:
        return _Busy(self, what, limit_s)

    def check(self, now: float) -> float:
        """Called about twice a second; returns for how many seconds the loop is later than it said it would be.

        Dumps once per stall at the soft limit and ends the process at the hard limit. A declared long step moves both:
        the soft limit is then at least the time that the step asked for, the hard limit counts from its end.
        """
        count, doing = self.count, self.doing
        if self.idle_depth or count != self._seen:
            self._seen, self._since, self._dumped = count, now, False
        elapsed = now - self._since
        allowance = doing[1] if doing else 0.0
        soft, hard = self._limits
        if soft:
            if elapsed >= max(soft, allowance) and not self._dumped:
                self._dump(elapsed, doing)
            # Also while idle: the next turn may be the one that takes the lock and keeps it.
            faulthandler.dump_traceback_later(
                max(soft, allowance) + _TIMER_MARGIN_S, repeat=False, file=self._stacks.file
            )
        if hard and elapsed >= allowance + hard:
            self._stacks.write(f"{self._name}: no progress for {elapsed:.1f} s, this process ends")
            _log.error("no progress for %.1f s: this process ends (stacks are in its watchdog log)", elapsed)
            self._end(EXIT_WATCHDOG)
        return max(elapsed - allowance, 0.0)

    def _dump(self, elapsed: float, doing: tuple[str, float] | None) -> None:
        self._dumped = True
        what = f" in {doing[0]!r} (expected within {doing[1]:g} s)" if doing else ""
        line = f"{self._name}: no progress for {elapsed:.1f} s{what}, turn {self.count}"
        self._stacks.write(line + "; stacks of all threads:")
        faulthandler.dump_traceback(file=self._stacks.file, all_threads=True)
        self._dump_native()
        _log.warning("no progress for %.1f s%s; stacks are in the watchdog log", elapsed, what)

    def _dump_native(self) -> None:
        """Native frames too, where py-spy is installed and allowed to look (containers mostly forbid it)."""
        spy = shutil.which("py-spy")
        if spy is not None:
            command = [spy, "dump", "--native", "--pid", str(os.getpid())]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    command, stdout=self._stacks.file, stderr=self._stacks.file, timeout=_SPY_TIMEOUT_S, check=False
                )

    def close(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._stacks.close()
