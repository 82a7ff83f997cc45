"""How much work this api process lets in, and when the refused should come back.

Owner process: api. The engine has the last word (its queue is shared by all api processes); this is the cheap check
before a prompt is tokenized, and the estimate behind Retry-After. Time is a parameter.
"""

from __future__ import annotations

from collections import deque

from nanoserve.api.errors import Unavailable

_WINDOW_S = 30.0
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_FULL = "The server is busy and cannot accept new requests. Please try again later."


class DrainRate:
    """Requests that ended per second, over the last half minute."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=1024)

    def note_end(self, now_s: float) -> None:
        self._ends.append(now_s)

    def per_second(self, now_s: float) -> float:
        while self._ends and self._ends[0] < now_s - _WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return 0.0
        return len(self._ends) / max(now_s - self._ends[0], 1e-3)

    def seconds_for(self, num_requests: int, now_s: float) -> float:
        """How long until so many requests have ended; between 1 s and 60 s."""
        rate = self.per_second(now_s)
        seconds = num_requests / rate if rate else _MIN_RETRY_S
        return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)


class Admission:
    """Counts the requests that this process has let in and that have not ended."""

    def __init__(self, *, max_running: int, max_queued: int, overload_status: int = 503) -> None:
        self._limit = max_running + max_queued
        self._max_queued = max_queued
        self._overload_status = overload_status
        self._drain = DrainRate()
        self._held_by_key: dict[str, int] = {}  # of those let in under a key
        self.num_held = 0
        self.num_rejected = 0

    def refuse_if_full(self, now_s: float) -> None:
        """Unavailable when there is no place at all: the cheap check before a prompt is tokenized."""
        if self.num_held >= self._limit:
            self._refuse(now_s)

    def admit(self, num_requests: int, now_s: float, key: str | None = None) -> None:
        """Counts them in; Unavailable when the limit would be passed. An empty server takes any one request.

        With a `key`, equal shares: k keys that hold places may have limit/(k+1) each, so that whoever comes next finds
        one. A key that holds nothing may pass its share with one request.
        """
        if self.num_held and self.num_held + num_requests > self._limit:
            self._refuse(now_s)
        if key is not None:
            held = self._held_by_key.get(key, 0)
            num_keys = len(self._held_by_key) + (not held)
            if held and held + num_requests > max(self._limit // (num_keys + 1), 1):
                self._refuse(now_s)
            self._held_by_key[key] = held + num_requests
        self.num_held += num_requests

    def leave(self, num_requests: int, now_s: float, key: str | None = None) -> None:
        self.num_held -= num_requests
        if key is not None:
            self._held_by_key[key] -= num_requests
            if not self._held_by_key[key]:
                del self._held_by_key[key]
        for _ in range(min(num_requests, 64)):
            self._drain.note_end(now_s)

    def _refuse(self, now_s: float) -> None:
        self.num_rejected += 1
        raise Unavailable(_FULL, retry_after_s=self.retry_after_s(now_s), status=self._overload_status)

    def seconds_for(self, num_requests: int, now_s: float) -> float:
        """How long so many requests take to end, at the measured rate."""
        return self._drain.seconds_for(num_requests, now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Until half of the queue has drained at the measured rate."""
        excess = max(self.num_held - self._limit + self._max_queued // 2, 1)
        return self._drain.seconds_for(excess, now_s)
