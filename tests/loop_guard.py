"""What must not happen on an event loop: system calls that wait, and callbacks that hold up all others.

`guarded_loop()` watches the callbacks of our own tasks and of aiohttp's server while a test runs. Two nets:

- audit events of the interpreter (files, processes, names, connections) inside a callback count, however short;
- of every callback the time is taken that it neither computed nor waited for a core: what is left is waiting (a lock, a
  future, a socket), which no loaded machine can feign. Its computing time has a bound of its own.

Callbacks of tests and their helpers are not watched: they may write files.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  # asyncio loads it at its first use, on the loop
import gc
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType
from typing import Any

WAITING_LIMIT_S = 0.05  # a switch of threads under the interpreter's lock takes 0.005
COMPUTING_LIMIT_S = 0.5
_WATCHED = re.compile(r"/(nanoserve|aiohttp|asyncio)/")
_WAITING = frozenset(
    {"open", "subprocess.Popen", "os.system", "os.posix_spawn", "os.listdir", "os.scandir", "os.remove",
     "os.mkdir", "os.rename", "shutil.rmtree", "socket.getaddrinfo", "socket.gethostbyname", "socket.connect",
     "urllib.Request", "http.client.connect"}
)  # fmt: skip
_handle_run = asyncio.events.Handle._run


class LoopGuard:
    """What was found while it was on."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._thread = 0
        self._running = ""  # the callback that is watched; empty outside of one
        self._schedstat = -1

    def __enter__(self) -> LoopGuard:
        self._thread = threading.get_ident()
        self._schedstat = os.open(f"/proc/self/task/{threading.get_native_id()}/schedstat", os.O_RDONLY)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._schedstat)

    def run(self, handle: asyncio.Handle) -> None:
        """In place of `Handle._run`."""
        code = _code_of(handle)
        if threading.get_ident() != self._thread or code is None or not _WATCHED.search(code.co_filename):
            _handle_run(handle)
            return
        outer, self._running = self._running, code.co_qualname
        began, cpu, queued = time.monotonic(), time.thread_time(), self._queued_s()
        try:
            _handle_run(handle)
        finally:
            computed = time.thread_time() - cpu
            waited = time.monotonic() - began - computed - (self._queued_s() - queued)
            if waited > WAITING_LIMIT_S or computed > COMPUTING_LIMIT_S:
                self.found.append(f"{self._running} waited {waited:.3f} s and computed {computed:.3f} s in one turn")
            self._running = outer

    def _queued_s(self) -> float:
        """For how long this thread has been ready to run without a core."""
        return int(os.pread(self._schedstat, 100, 0).split()[1]) / 1e9

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        is_watched = bool(self._running) and threading.get_ident() == self._thread
        if is_watched and event in _WAITING and not str(args[:1]).endswith(".py',)"):  # a traceback reads its source
            turn, self._running = self._running, ""  # so does this one
            place = "".join(traceback.format_stack(sys._getframe(2), limit=6))
            self.found.append(f"{event}{args[:1]} in {turn}:\n{place}")
            self._running = turn


def _code_of(handle: asyncio.Handle) -> CodeType | None:
    """The code of a handle's task, or of its callback."""
    callback: Any = handle._callback
    owner = getattr(callback, "__self__", None)
    if isinstance(owner, asyncio.Task):
        coroutine: Any = owner.get_coro()
        return getattr(coroutine, "cr_code", None) or getattr(coroutine, "gi_code", None)
    while hasattr(callback, "func"):
        callback = callback.func
    return getattr(callback, "__code__", None)


_active: LoopGuard | None = None


@cache
def _hook() -> None:
    """Once, and for good: the interpreter takes no hook back."""
    sys.addaudithook(lambda event, args: _active.audit(event, args) if _active is not None else None)


@contextmanager
def guarded_loop() -> Iterator[LoopGuard]:
    """Watches the loop of this thread. AssertionError at the end for what was found."""
    global _active
    # A test session holds hundreds of thousands of objects: a full collection takes a second of whatever turn it meets.
    gc.freeze()
    _hook()
    with LoopGuard() as guard:
        asyncio.events.Handle._run = lambda handle: guard.run(handle)  # type: ignore[method-assign]
        _active = guard
        try:
            yield guard
        finally:
            _active = None
            asyncio.events.Handle._run = _handle_run  # type: ignore[method-assign]
    assert not guard.found, "on the event loop:\n" + "\n".join(guard.found)
