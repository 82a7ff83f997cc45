"""What the supervisor waits on besides messages: the ends of its children and the operator's signals."""

from __future__ import annotations

import os
import select
import signal

from nanoserve.children import Child


class Wakeups:
    """One file descriptor that becomes readable when a child ends or a stop signal comes."""

    def __init__(self) -> None:
        self.stops = 0
        self._epoll = select.epoll()
        self._signal_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._signal_fd, select.EPOLLIN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.stops += 1
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
        self._wakeups.watch(child)
        self._children[child.name] = child

    def get(self, name: str) -> Child | None:
        return self._children.get(name)

    def all(self) -> list[Child]:
        return list(self._children.values())

    def living(self, *roles: str) -> list[Child]:
        return [child for child in self._children.values() if child.alive and child.role in roles]

    def reap(self) -> list[tuple[Child, int]]:
        """Children that have ended since the last call, with their exit codes."""
        ended = self._wakeups.ended()
        return [(child, child.reap()) for child in self._children.values() if child.alive and child.pidfd in ended]

    def kill(self, *roles: str) -> None:
        for child in self.living(*roles):
            child.send_signal(signal.SIGKILL)
            child.reap()
