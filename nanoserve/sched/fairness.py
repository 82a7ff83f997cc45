"""Fair shares between API keys: start-time fair queueing (Goyal, Vin, Cheng 1996) over the scheduler's priorities.

Pure; used by `engine.core`, and `Seats` by the scheduler, with `--scheduling-policy fair`. Each request gets a tag in
tokens, and lower tags are served first: a key that asks for much gets tags far ahead, one that comes seldom starts at
the present. What a request asked for and did not use is given back at its end: most chats ask for the whole context and
end early. Tags say only who goes next, so an idle key saves up nothing and nobody waits while there is room. It lives
in the engine because all api processes meet there: one clock, one count of places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from nanoserve.errors import RequestError
from nanoserve.sched.admission import SchedulerLimits
from nanoserve.sched.request import Request
from nanoserve.shares import equal_share

_MAX_KEYS = 10_000


class FairClock:
    """Virtual time in tokens. Keys that have nothing ahead of the present are forgotten."""

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[str, int] = {}  # where each key's last request ends

    def tag(self, key: str, num_tokens: int) -> int:
        """The start tag of a new request of `key` that asks for `num_tokens` (prompt and answer)."""
        start = max(self._now, self._ends.get(key, 0))
        self._ends[key] = start + max(num_tokens, 1)
        if len(self._ends) > _MAX_KEYS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        return start

    def give_back(self, key: str, num_tokens: int) -> None:
        """So many of the tokens that `key` asked for were not used."""
        if key in self._ends:
            self._ends[key] -= num_tokens

    def started(self, tag: int) -> None:
        """A request with this tag is being served: the present is there."""
        self._now = max(self._now, tag)


class _Place(NamedTuple):
    tag: int
    num_tokens: int  # asked for


class FairShares:
    """Who may have how many of the engine's places (`equal_share`), and in which order they are served."""

    def __init__(self, num_places: int, since_ns: int = 0) -> None:
        """`since_ns`: when this engine's life began."""
        self._num_places = num_places
        self._since_ns = since_ns
        self._clock = FairClock()
        self._held: dict[str, dict[int, _Place]] = {}  # key: its requests by id, in the order of arrival and of tags
        self._keys: dict[int, str] = {}  # of each live request

    def admit(
        self,
        request_id: int,
        key: str,
        num_tokens: int,
        *,
        num_siblings: int = 1,
        resumed: bool = False,
        arrival_ns: int = 0,
    ) -> int:
        """The tag of a new request, which is its priority. RequestError 503 when its key has its share already.

        One HTTP request of many single ones (`num_siblings`) may pass the share of a key that holds nothing else. A
        resumed request was admitted before, and so was one that is older than this engine: the api processes hand
        theirs over one after the other, and not in the order in which they came.
        """
        resumed = resumed or 0 < arrival_ns < self._since_ns
        held = self._held.get(key, {})
        share = max(equal_share(self._num_places, self._held.keys(), key), num_siblings)
        if len(held) >= share and not resumed:
            raise RequestError(
                "This API key has its share of the queue already. Please try again later.",
                status=503,
                error_type="service_unavailable_error",
                code="queue_full",
            )
        tag = self._clock.tag(key, num_tokens)
        if held:  # what was given back does not let the new pass the old of the same key
            tag = max(tag, next(reversed(held.values())).tag)
        held[request_id] = _Place(tag, num_tokens)
        self._held[key] = held
        self._keys[request_id] = key
        return tag

    def started(self, request_id: int) -> None:
        if (key := self._keys.get(request_id)) is not None:
            self._clock.started(self._held[key][request_id].tag)

    def end(self, request_id: int, num_used: int) -> None:
        """Its place is free, and what it asked for beyond `num_used` tokens; unknown ids are passed over."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return
        held = self._held[key]
        self._clock.give_back(key, max(held.pop(request_id).num_tokens - num_used, 0))
        if not held:
            del self._held[key]


class Seats:
    """Who of the waiting may take a seat in a step; made for one step of the scheduler.

    With fair shares the last eighth of the seats is kept for keys that hold less than their `equal_share`. So a flood
    of long answers cannot hold every seat, and whoever comes seldom need not wait for the end of one. Under other
    policies every seat is anybody's.
    """

    def __init__(self, limits: SchedulerLimits, running: Iterable[Request]) -> None:
        self._num_seats = limits.max_num_running
        self._is_shared = limits.policy == "fair"
        self._num_open = self._num_seats - (max(1, self._num_seats // 8) if self._num_seats > 1 else 0)
        self._held = Counter(request.share_key for request in running) if self._is_shared else Counter[str]()

    def is_free_for(self, request: Request) -> bool:
        """Whether there is one that `request` may take, if there is one at all."""
        if not self._is_shared or request.is_probe or self._held.total() < self._num_open:
            return True
        key = request.share_key
        return self._held[key] < equal_share(self._num_seats, self._held.keys(), key)

    def take(self, request: Request) -> None:
        if self._is_shared:
            self._held[request.share_key] += 1
