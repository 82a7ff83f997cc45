"""One log line per failed request, and not more of the same kind than one a second.

Owner process: api. Only failures of ours (5xx) are written; nothing of the request's content is. Time is a parameter.
"""

from __future__ import annotations

import logging

from nanoserve.errors import RequestError

log = logging.getLogger(__name__)

_INTERVAL_S = 1.0


class FailureLog:
    """Counts what it leaves out and says so with the next line of that kind."""

    def __init__(self) -> None:
        self._next_s: dict[tuple[int, str | None], float] = {}
        self._num_left_out: dict[tuple[int, str | None], int] = {}

    def note(self, label: str, error: RequestError, now_s: float) -> None:
        """Writes or counts this failure; client errors are the client's business."""
        if error.status < 500:
            return
        kind = (error.status, error.code)
        if now_s < self._next_s.get(kind, 0.0):
            self._num_left_out[kind] = self._num_left_out.get(kind, 0) + 1
            return
        self._next_s[kind] = now_s + _INTERVAL_S
        others = self._num_left_out.pop(kind, 0)
        more = f" (and {others} more like it)" if others else ""
        log.warning("request %s failed: %d %s%s", label, error.status, error.message, more)
