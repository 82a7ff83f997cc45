"""How much work this api process lets in, and when the refused should come back.

Owner process: api. The engine has the last word (its queue, and each key's share of it, are those of all api
processes); this is the cheap check before a prompt is tokenized, and the estimate behind Retry-After. Time is a
parameter.
"""

from __future__ import annotations

from collections import deque

from nanoserve.api.errors import Unavailable
from nanoserve.shares import equal_share

_WINDOW_S = 30.0
_GRAIN_S = 0.05  # looks that are closer than this are one
_MIN_RETRY_S = 1.0
_MAX_RETRY_S = 60.0
_FULL = "The server is busy and cannot accept new requests. Please try again later."


class DrainRate:
    """Requests that ended per second, over the last half minute, wherever in the server they came from."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, float]] = deque()  # when, and how many had ended by then

    def note_ended(self, total: float, now_s: float) -> None:
        """`total`: how many requests have ended since the server began."""
        looks = self._looks
        if looks and looks[-1][1] == total:
            return
        if len(looks) > 1 and now_s - looks[-1][0] < _GRAIN_S:
            looks[-1] = (looks[-1][0], total)
        else:
            looks.append((now_s, total))

    def per_second(self, now_s: float) -> float:
        looks = self._looks
        while looks and looks[0][0] < now_s - _WINDOW_S:
            looks.popleft()
        if len(looks) < 2:
            return 0.0
        return (looks[-1][1] - looks[0][1]) / max(now_s - looks[0][0], 1e-3)

    def seconds_for(self, num_requests: int, now_s: float) -> float:
        """How long until so many requests have ended; between 1 s and 60 s."""
        rate = self.per_second(now_s)
        seconds = num_requests / rate if rate else _MIN_RETRY_S
        return min(max(seconds, _MIN_RETRY_S), _MAX_RETRY_S)


class BodyBudget:
    """Bytes of request bodies that are being read, over all connections: each has its limit, and there are many."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Counts them in as they come: announcing a body takes nothing from anybody. Unavailable beyond the limit."""
        if self.num_bytes + num_bytes > self._max_bytes:
            raise Unavailable("Too many request bodies are being read at once.", retry_after_s=_MIN_RETRY_S)
        self.num_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class Admission:
    """Counts the requests that this process has let in and that have not ended."""

    def __init__(self, *, max_running: int, max_queued: int, overload_status: int = 503) -> None:
        self._limit = max_running + max_queued
        self._max_queued = max_queued
        self._overload_status = overload_status
        self.drain = DrainRate()
        self._held_by_key: dict[str, int] = {}  # of those let in under a key
        self.num_held = 0
        self.num_rejected = 0

    def refuse_if_full(self, now_s: float) -> None:
        """Unavailable when there is no place at all: the cheap check before a prompt is tokenized."""
        if self.num_held >= self._limit:
            self._refuse(now_s)

    def admit(self, num_requests: int, now_s: float, key: str = "") -> None:
        """Counts them in; Unavailable when the limit would be passed. An empty server takes any one request.

        With a `key` (fair scheduling) equal shares, so that one that floods does not take the places here before the
        engine, which does the same over all api processes, has spoken. A key that holds nothing may pass its share with
        one request.
        """
        if self.num_held and self.num_held + num_requests > self._limit:
            self._refuse(now_s)
        if key:
            held = self._held_by_key.get(key, 0)
            if held and held + num_requests > equal_share(self._limit, self._held_by_key, key):
                self._refuse(now_s)
            self._held_by_key[key] = held + num_requests
        self.num_held += num_requests

    def leave(self, num_requests: int, key: str = "") -> None:
        self.num_held -= num_requests
        if key:
            self._held_by_key[key] -= num_requests
            if not self._held_by_key[key]:
                del self._held_by_key[key]

    def _refuse(self, now_s: float) -> None:
        self.num_rejected += 1
        raise Unavailable(_FULL, retry_after_s=self.retry_after_s(now_s), status=self._overload_status)

    def seconds_for(self, num_requests: int, now_s: float) -> float:
        """How long so many requests take to end, at the measured rate."""
        return self.drain.seconds_for(num_requests, now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Until half of the queue has drained at the measured rate."""
        excess = max(self.num_held - self._limit + self._max_queued // 2, 1)
        return self.drain.seconds_for(excess, now_s)
