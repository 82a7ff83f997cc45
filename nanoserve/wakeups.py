"""What the supervisor waits on besides messages: signals of the operator, ends of its children, their silence."""

from __future__ import annotations

import logging
import math
import os
import select
import signal
from pathlib import Path

from nanoserve.children import READY, RESTARTING, STALLED, STARTING, Child
from nanoserve.ipc.messages import SupervisorInbox
from nanoserve.obs.logs import log_file

_log = logging.getLogger(__name__)

# A pulse comes every half second, and health must tell the truth within two seconds. How late its loop is a process
# counts from its last pulse that still saw progress.
SILENT_S = 1.6
LATE_S = 1.0
FIRST_PULSE_S = 30.0  # from the start of a process to its first pulse, on the slowest machine


class Wakeups:
    """One file descriptor that becomes readable when a child ends or a stop signal comes."""

    def __init__(self) -> None:
        self.stops = 0
        self.last_stop = ""  # the signal's name, for the operator
        self._epoll = select.epoll()
        self._signal_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._signal_fd, select.EPOLLIN)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` leaves SIGHUP
                signal.signal(number, self._on_signal)

        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # means nothing here; children inherit it

    def _on_signal(self, number: int, _: object) -> None:
        self.stops += 1
        self.last_stop = signal.Signals(number).name
        os.eventfd_write(self._signal_fd, 1)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, child: Child) -> None:
        self._epoll.register(child.pidfd, select.EPOLLIN)

    def ended(self) -> set[int]:
        """The pidfds of children that have ended and are not reaped yet."""
        ready = {fd for fd, _ in self._epoll.poll(0)}
        if self._signal_fd in ready:
            ready.discard(self._signal_fd)
            os.eventfd_read(self._signal_fd)
        return ready

    def close(self) -> None:
        self._epoll.close()
        os.close(self._signal_fd)


class ChildTable:
    """The children by name, one record each: the newest life. Knows which have ended."""

    def __init__(self, wakeups: Wakeups) -> None:
        self._wakeups = wakeups
        self._children: dict[str, Child] = {}

    def add(self, child: Child) -> None:
        if child.is_ours:
            self._wakeups.watch(child)
        self._children[child.name] = child

    def get(self, name: str) -> Child | None:
        return self._children.get(name)

    def all(self) -> list[Child]:
        return list(self._children.values())

    def living(self, *roles: str) -> list[Child]:
        return [child for child in self._children.values() if child.is_ours and child.role in roles]

    def reap(self) -> list[tuple[Child, int]]:
        """Children that have ended since the last call, with their exit codes."""
        ended = self._wakeups.ended()
        return [(child, child.reap()) for child in self._children.values() if child.is_ours and child.pidfd in ended]

    def kill(self, *roles: str) -> None:
        for child in self.living(*roles):
            child.send_signal(signal.SIGKILL)
            child.reap()

    def meet(self, message: SupervisorInbox, log_dir: Path) -> Child | None:
        """A new life of a process that somebody else has started (`--role`); None where that cannot be."""
        role, _, index = message.name.rpartition("-")
        if role not in ("engine", "detok"):
            return None
        state = STARTING if message.incarnation == 1 else RESTARTING
        child = Child(role, int(index), message.incarnation, 0, log_file(log_dir, message.name), state=state)
        self._children[child.name] = child
        return child

    def check_pulses(self, now: float, hard_s: float, startup_s: float = math.inf) -> bool:
        """Marks processes that are stopped or stuck; True when anything changed.

        One of ours that stays silent for `hard_s` (0: for ever) is ended: its own watchdog cannot run any more. So is a
        later life that is not ready after `startup_s`, or never begins to beat: streams wait for it.
        """
        changed = False
        for child in self._children.values():
            if child.state not in (READY, STALLED, RESTARTING):
                continue
            silent = now - child.heard
            if child.state == RESTARTING:
                is_lost = bool(hard_s) and silent > max(hard_s, FIRST_PULSE_S)
                is_lost |= now - child.started_ns * 1e-9 > startup_s
            else:
                changed |= self._mark(child, silent)
                is_lost = bool(hard_s) and silent > hard_s + SILENT_S
            if is_lost and not child.condemned:
                _log.error("%s, %s, gave no sign of life for %.0f s: it is ended", child.name, child.state, silent)
                child.condemned = True
                child.send_signal(signal.SIGKILL)
        return changed

    def _mark(self, child: Child, silent: float) -> bool:
        state = STALLED if silent > SILENT_S or child.late_s > LATE_S else READY
        if state == child.state:
            return False
        child.state = state
        _log.warning("%s is %s (silent %.1f s, late %.1f s)", child.name, state, silent, child.late_s)
        return True
