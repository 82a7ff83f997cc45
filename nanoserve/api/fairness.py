"""Fair shares between API keys: start-time fair queueing (Goyal, Vin, Cheng 1996) over the engine's priorities.

Owner process: api; used with `--scheduling-policy fair`. Each request gets a tag in tokens, and the engine serves lower
tags first: a key that asks for much gets tags far ahead, one that comes seldom starts at the present. Tags say only
who goes next, so an idle key saves up nothing and nobody waits while there is room. Pure; several api processes keep
separate clocks, which is fair within each.
"""

from __future__ import annotations

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

    def started(self, tag: int) -> None:
        """A request with this tag has got its first token: the present is there."""
        self._now = max(self._now, tag)
