"""What a child process is given to talk with its supervisor and to know when to stop.

`nanoserve.child` implements it for real processes; tests and `nanoserve.LLM` pass a plain object.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from nanoserve.ipc.messages import EngineFacts

STANDBY = 0  # the incarnation of a process that waits to become one
EXIT_STREAMS_CUT = 75  # an api returns it from `run` when streams were cut at the end of the drain time


class Watchdog(Protocol):
    """Progress of one loop. A loop that neither feeds nor is idle for too long has its stacks dumped."""

    def feed(self) -> None:
        """Call once per turn of the loop."""
        ...

    def idle(self) -> AbstractContextManager[None]:
        """Wrap blocking receives: waiting is not a stall."""
        ...

    def busy(self, what: str, limit_s: float) -> AbstractContextManager[None]:
        """Wrap a step that is expected to be long: `what` is logged if it takes more than `limit_s`."""
        ...


class ProcessLink(Protocol):
    name: str  # "engine-0"
    index: int
    incarnation: int  # 1 for the first life
    watchdog: Watchdog

    @property
    def stop_requested(self) -> bool: ...

    @property
    def stop_fd(self) -> int:
        """Readable once a stop is requested; hand it to `Inbox(wake_fd=...)` or the event loop."""
        ...

    def stage(self, stage: str, progress: float = 0.0, *, model_dir: str = "") -> None:
        """Tells what this process is doing while it starts; cheap to call often."""
        ...

    def ready(self, engine: EngineFacts | None = None, *, ring_turned: bool = False) -> None: ...
