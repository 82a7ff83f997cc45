"""Prompt lookup: what followed the last time the newest tokens stood in prompt or output. Ids only; pure.

Owned by `sched.drafts`, one index per request that decodes. The idea is Saxena's ("Prompt Lookup Decoding", 2023): text
that quotes, edits or repeats goes on as it did before, so earlier text is a draft model that costs nothing.

The index is the hash chain of Deflate (RFC 1951, section 4): a map from each run of `shortest` ids to where it ended
last, and per position a link to where its run ended before that. A token costs one map entry and one link when it is
added; a proposal compares at most MAX_CANDIDATES places. The alternatives, a scan of the text per step (which grows
with the context) and one map per match length (which multiplies the memory), find the same or slightly longer matches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MAX_CANDIDATES = 8  # latest places with the newest run that are compared
MAX_MATCH = 32  # ids; matches that agree this far back are equally good
_NOWHERE = -1


class NgramIndex:
    """Where each run of `shortest` ids of one growing text ended. The caller keeps the text and only appends to it."""

    __slots__ = ("_last", "_links", "_shortest")

    def __init__(self, shortest: int) -> None:
        assert shortest >= 1
        self._shortest = shortest
        self._last: dict[tuple[int, ...], int] = {}
        self._links = array("i")  # of each position: where its run ended before

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes in those of the text's ids that are new since the last call."""
        last, links, shortest = self._last, self._links, self._shortest
        for position in range(len(links), len(token_ids)):
            if position + 1 < shortest:
                links.append(_NOWHERE)
                continue
            run = tuple(token_ids[position + 1 - shortest : position + 1])
            links.append(last.get(run, _NOWHERE))
            last[run] = position

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        """At most `count` ids that may follow; none where the newest run is new.

        Takes the place whose text agrees furthest back, the latest of equals. What followed there is repeated past
        the text's end (as an overlapping copy of LZ77), so a text in a loop is drafted at full length.
        """
        self.extend(token_ids)
        end, best, longest = len(token_ids), _NOWHERE, 0
        place = self._links[-1] if end else _NOWHERE
        for _ in range(MAX_CANDIDATES):
            if place == _NOWHERE or longest == MAX_MATCH:
                break
            length = self._match(token_ids, place)
            if length > longest:
                best, longest = place, length
            place = self._links[place]
        if best == _NOWHERE or count <= 0:
            return []
        drafts = list(token_ids[best + 1 : best + 1 + count])
        period = end - best - 1
        while len(drafts) < count:
            drafts.append(drafts[-period])
        return drafts

    def _match(self, token_ids: Sequence[int], place: int) -> int:
        """How many ids up to `place` equal the newest ones, `shortest` of which are known to; at most MAX_MATCH."""
        length, shift = self._shortest, len(token_ids) - 1 - place
        while length < MAX_MATCH and length <= place and token_ids[place - length] == token_ids[place - length + shift]:
            length += 1
        return length
