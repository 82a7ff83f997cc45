"""One clock for everything that happens because time has passed: keep-alive comments, deadlines, stuck writers.

Owner process: api. A timer per stream would be renewed at every token; instead one tick looks at all live responses.
`tick` takes the time as a parameter and does no I/O of its own.
"""

from __future__ import annotations

from typing import Protocol

TICK_S = 0.25


class Paced(Protocol):
    """A live response."""

    labels: set[str]

    def abort(self) -> None:
        """Ends it with what it has."""
        ...

    def on_tick(self, now_s: float) -> None:
        """Looks at its own deadlines. Must not block or raise."""
        ...


class Pacer:
    """The set of live responses; `process` calls `tick` every TICK_S."""

    def __init__(self) -> None:
        self._paced: set[Paced] = set()

    def __len__(self) -> int:
        return len(self._paced)

    def add(self, paced: Paced) -> None:
        self._paced.add(paced)

    def remove(self, paced: Paced) -> None:
        self._paced.discard(paced)

    def abort(self, labels: set[str] | None) -> set[str]:
        """Ends the responses with one of these labels (None: all of them); returns the labels that were ended."""
        ended: set[str] = set()
        for paced in list(self._paced):
            hit = paced.labels if labels is None else paced.labels & labels
            if hit:
                paced.abort()
                ended |= hit
        return ended

    def tick(self, now_s: float) -> None:
        for paced in list(self._paced):
            paced.on_tick(now_s)
