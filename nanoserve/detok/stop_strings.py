"""Stop strings as an automaton over characters: one step per character, nothing is ever searched twice.

Pure; used by the detokenizer's manager, one `StopMatcher` per request that has stop strings. The automaton is
Aho and Corasick's (Efficient String Matching, CACM 18(6), 1975): a trie of the stop strings with failure links. Its
state after some text is the longest tail of that text which a stop string begins with, and that is exactly what has
to be held back. The rejected alternatives hold back `max(len) - 1` characters always, or search the text again.

Rules: the match that ends first wins, the longest of those that end there; text is matched as it is released, so
the answer does not depend on how tokens split it.
"""

from __future__ import annotations

import re
from collections import deque
from functools import lru_cache
from typing import NamedTuple, Protocol

from nanoserve.stop_regex import RegexMatcher

_ROOT = 0
_MAX_KEPT_CHARS = 512


class StopHit(NamedTuple):
    end: int  # characters of the scanned piece up to the end of the match
    length: int  # characters of the match; it may have begun in an earlier piece
    stop: str  # the stop string or pattern


class Matcher(Protocol):
    """Reads one request's text piece by piece."""

    def scan(self, piece: str, *, armed: bool = True) -> StopHit | None:
        """Advances over `piece` up to the first match. Unarmed matches (before `min_tokens`) do not count."""
        ...

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still become a match; the least that is safe."""
        ...


class StopAutomaton:
    """The trie with failure links, immutable once built; requests with equal stop strings share one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        """Builds in time linear in the total length. An empty string is ValueError."""
        if not all(stops):
            raise ValueError("a stop string is empty")
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.fail = [_ROOT]
        self.match: list[str | None] = [None]  # the longest stop string that ends in this state
        for stop in stops:
            self._insert(stop)
        self._link()
        # A piece without any first character leaves the root in C, not in Python.
        self.first = re.compile("[" + "".join(re.escape(char) for char in sorted(self.next[_ROOT])) + "]")

    def _insert(self, stop: str) -> None:
        state = _ROOT
        for char in stop:
            child = self.next[state].get(char)
            if child is None:
                child = len(self.next)
                self.next[state][char] = child
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.fail.append(_ROOT)
                self.match.append(None)
            state = child
        self.match[state] = stop

    def _link(self) -> None:
        queue = deque(self.next[_ROOT].values())
        while queue:
            state = queue.popleft()
            for char, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], char)
                self.match[child] = self.match[child] or self.match[self.fail[child]]
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        while True:
            child = self.next[state].get(char)
            if child is not None:
                return child
            if state == _ROOT:
                return _ROOT
            state = self.fail[state]


_kept = lru_cache(maxsize=256)(StopAutomaton)


def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings; the most recent ones are kept, for requests often share them.

    Not so those of very many characters, at some 350 bytes each: they live as long as their request does.
    """
    return _kept(stops) if sum(map(len, stops)) <= _MAX_KEPT_CHARS else StopAutomaton(stops)


class StopMatcher:
    """Where one request's text stands in its automaton."""

    __slots__ = ("_automaton", "_state")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = automaton(stops)
        self._state = _ROOT

    def scan(self, piece: str, *, armed: bool = True) -> StopHit | None:
        """Advances over `piece` up to the first match. Unarmed matches (before `min_tokens`) do not count."""
        machine = self._automaton
        state = self._state
        position, length = 0, len(piece)
        while position < length:
            if state == _ROOT:
                found = machine.first.search(piece, position)
                if found is None:
                    break
                position = found.start()
            state = machine.step(state, piece[position])
            position += 1
            stop = machine.match[state]
            if stop is not None and armed:
                self._state = state
                return StopHit(position, len(stop), stop)
        # A complete stop string that did not count is no proper prefix of anything unless the trie goes on.
        while state != _ROOT and not machine.next[state]:
            state = machine.fail[state]
        self._state = state
        return None

    @property
    def held(self) -> int:
        """Characters at the end of the text that may still become a stop string; the least that is safe."""
        return self._automaton.depth[self._state]


class AnyMatcher:
    """Stop strings and patterns together: the match that ends first wins, the longest of those that end there."""

    __slots__ = ("_patterns", "_strings")

    def __init__(self, stops: tuple[str, ...], patterns: tuple[str, ...]) -> None:
        self._strings = [StopMatcher(stops)] if stops else []
        self._patterns = [RegexMatcher(pattern) for pattern in patterns]

    def scan(self, piece: str, *, armed: bool = True) -> StopHit | None:
        hits = [hit for strings in self._strings if (hit := strings.scan(piece, armed=armed)) is not None]
        for matcher in self._patterns:
            found = matcher.scan(piece, armed=armed)
            if found is not None:
                hits.append(StopHit(found.end, found.length, matcher.pattern))
        return min(hits, key=lambda hit: (hit.end, -hit.length), default=None)

    @property
    def held(self) -> int:
        return max([*(strings.held for strings in self._strings), *(pattern.held for pattern in self._patterns)])


def make_matcher(stops: tuple[str, ...], patterns: tuple[str, ...] = ()) -> Matcher | None:
    """The matcher of a request; None when it has nothing to stop at. ValueError for what api should have refused."""
    if patterns:
        return AnyMatcher(stops, patterns)
    return StopMatcher(stops) if stops else None
