"""Regular expressions over a stream of characters, in time that no pattern can blow up. Pure.

Used by api (to refuse a pattern with a reason) and by the detokenizer (to stop at it). Patterns become a
non-deterministic automaton (Thompson, Regular Expression Search Algorithm, CACM 11(6), 1968) that is walked over all
its states at once, one character after the other: no backtracking, at most `MAX_STATES` steps a character, nothing is
read twice, and what it keeps is where the matches in progress began, for each live state a set of at most
`MAX_MATCH_CHARS` bits, which says how much of the text may still become a match. (Pike's rule keeps the earliest
beginning alone: once that one is too long ago, the younger matches would be lost with it.) `re` can neither go on
where it stopped nor promise a bound; RE2 cannot go on either.

Syntax is Python's: literals, `.`, `[...]`, `\\d \\w \\s` and other escapes, `|`, groups, `* + ? {m,n}` (lazy or not:
the match that ends first wins anyway), `(?i)` and `(?s)` in front. What looks beyond the match itself (anchors,
`\\b`, look-around, back-references) is refused, as is a pattern that matches the empty text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, NoReturn

MAX_PATTERN_BYTES = 256
MAX_STATES = 256
MAX_MATCH_CHARS = 1024  # a longer match is none: it bounds what is held back
_MAX_DEPTH = 20
_MATCHES = (1 << (MAX_MATCH_CHARS + 1)) - 1  # lengths that a match may have
_UNFINISHED = (1 << MAX_MATCH_CHARS) - 1  # lengths that may grow

_FLAGS = re.compile(r"\(\?([is]+)\)")
_REPEAT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}|\{(,)(\d+)\}")
_GROUP = re.compile(r"\((?:\?:|\?P<\w+>|(?!\?))")
_SET = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|0|[dDwWsSntrfva]|[^0-9a-zA-Z])", re.DOTALL)

Accepts = Callable[[str], bool]


class Regex:
    """A compiled pattern, immutable; `RegexMatcher` walks it."""

    def __init__(self, pattern: str) -> None:
        """ValueError, in words for a client, when the pattern is wrong, too large, or asks for what is not offered."""
        if len(pattern.encode("utf-8", "replace")) > MAX_PATTERN_BYTES:
            raise ValueError(f"is longer than {MAX_PATTERN_BYTES} bytes")
        self._accepts: list[Accepts | None] = [None]  # state 0 is the end
        self._next: list[int] = [0]
        self._free: list[list[int]] = [[]]  # moves without a character
        start = _Parser(pattern, self).build(0)
        closures = [self._closure(state) for state in range(len(self._next))]
        self.start, matches_empty = closures[start]
        if matches_empty:
            raise ValueError("matches the empty text")
        self.tests: list[Accepts] = [test if test is not None else _never for test in self._accepts]
        # Where a state goes with its character, and whether that ends a match.
        self.after = [closures[state] for state in self._next]

    def add_char(self, accepts: Accepts, next_state: int) -> int:
        return self._add(accepts, next_state, [])

    def add_split(self, ways: list[int]) -> int:
        """A state that is in all of `ways` at once; the list may be filled afterwards."""
        return self._add(None, 0, ways)

    def _add(self, accepts: Accepts | None, next_state: int, ways: list[int]) -> int:
        if len(self._next) >= MAX_STATES:
            raise ValueError("is too large when its repetitions are written out")
        self._accepts.append(accepts)
        self._next.append(next_state)
        self._free.append(ways)
        return len(self._next) - 1

    def _closure(self, state: int) -> tuple[tuple[int, ...], bool]:
        """The states that wait for a character, from here without one; and whether the end is among them."""
        seen, stack, waiting, ends = {state}, [state], [], False
        while stack:
            here = stack.pop()
            ends |= here == 0
            if self._accepts[here] is not None:
                waiting.append(here)
            for way in self._free[here]:
                if way not in seen:
                    seen.add(way)
                    stack.append(way)
        return tuple(sorted(waiting)), ends


def _never(char: str) -> bool:
    return False


@lru_cache(maxsize=256)
def compile_regex(pattern: str) -> Regex:
    """The compiled pattern; the most recent ones are kept. Raises as `Regex` does."""
    return Regex(pattern)


class RegexHit(NamedTuple):
    end: int  # characters of the scanned piece up to the end of the match
    length: int  # characters of the match; it may have begun in an earlier piece


class RegexMatcher:
    """Where one text stands in one pattern."""

    __slots__ = ("_live", "_regex", "pattern")

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self._regex = compile_regex(pattern)
        self._live: dict[int, int] = {}  # state -> in how many characters it was reached: bit n stands for n

    def scan(self, piece: str, *, armed: bool = True) -> RegexHit | None:
        """Advances up to the first match that ends in `piece`, the longest of those. Unarmed ones do not count."""
        regex = self._regex
        tests, after, start = regex.tests, regex.after, regex.start
        for place, char in enumerate(piece):
            here = self._live
            for state in start:
                here[state] = here.get(state, 0) | 1
            live: dict[int, int] = {}
            ended = 0
            for state, lengths in here.items():
                if not tests[state](char):
                    continue
                states, ends = after[state]
                lengths = (lengths << 1) & _MATCHES
                if ends:
                    ended |= lengths
                lengths &= _UNFINISHED
                if lengths:
                    for target in states:
                        live[target] = live.get(target, 0) | lengths
            self._live = live
            if ended and armed:
                return RegexHit(place + 1, ended.bit_length() - 1)
        return None

    @property
    def held(self) -> int:
        """Characters at the end of the text that a match may still begin with."""
        return max((lengths.bit_length() for lengths in self._live.values()), default=1) - 1


class _Parser:
    """Recursive descent; builds the automaton from the end of the pattern's text to its beginning.

    A parsed part is a function from the state after it to the state before it, so that a repetition can write its
    part out as often as it needs.
    """

    def __init__(self, pattern: str, regex: Regex) -> None:
        flags = _FLAGS.match(pattern)
        self._text = pattern
        self._at = flags.end() if flags else 0
        self._flags = sum(getattr(re, flag.upper()) for flag in set(flags[1])) if flags else 0
        self._regex = regex
        self._tests: dict[str, Accepts] = {}

    def build(self, end: int) -> int:
        part = self._alternatives(0)
        if self._at < len(self._text):
            self._refuse("has a `)` too many")
        return part(end)

    def _alternatives(self, depth: int) -> Part:
        if depth > _MAX_DEPTH:
            self._refuse("is nested too deeply")
        parts = [self._sequence(depth)]
        while self._at < len(self._text) and self._text[self._at] == "|":
            self._at += 1
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else lambda after: self._regex.add_split([part(after) for part in parts])

    def _sequence(self, depth: int) -> Part:
        parts: list[Part] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))

        def build(after: int) -> int:
            for part in reversed(parts):
                after = part(after)
            return after

        return build

    def _repeated(self, part: Part) -> Part:
        char = self._text[self._at : self._at + 1]
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(char, (1, 1))
        if char and char in "*+?":
            self._at += 1
        elif counted := _REPEAT.match(self._text, self._at):
            self._at = counted.end()
            least = int(counted[1] or 0)
            upper = counted[3] if counted[1] else counted[5]
            most = int(upper) if upper else None if counted[2] else least
            if most is not None and most < least:
                self._refuse("has a repetition whose bounds are the wrong way round")
        else:
            return part
        if self._text.startswith("?", self._at):
            self._at += 1
        if self._text[self._at : self._at + 1] in tuple("*+?") or _REPEAT.match(self._text, self._at):
            self._refuse("repeats a repetition")
        return lambda after: self._repeat(part, least, most, after)

    def _repeat(self, part: Part, least: int, most: int | None, after: int) -> int:
        if most is None:
            ways: list[int] = []
            loop = self._regex.add_split(ways)
            ways += [part(loop), after]
            after = loop
        else:
            end = after
            for _ in range(most - least):
                after = self._regex.add_split([part(after), end])
        for _ in range(least):
            before = part(after)
            if before == after:
                break  # a part that is nothing at all stays nothing, were it asked for a billion times
            after = before
        return after

    def _atom(self, depth: int) -> Part:
        text, at = self._text, self._at
        char = text[at]
        if char == "(":
            group = _GROUP.match(text, at)
            if group is None:
                self._refuse("has a `(?` group of a kind that is not supported")
            self._at = group.end()
            part = self._alternatives(depth + 1)
            if not text.startswith(")", self._at):
                self._refuse("has a `(` without its `)`")
            self._at += 1
            return part
        if char in "*+?" or _REPEAT.match(text, at):
            self._refuse("repeats nothing")
        if char in "^$":
            self._refuse("has an anchor, which is not supported")
        if char in "[\\":
            found = (_SET if char == "[" else _ESCAPE).match(text, at)
            if found is None:
                self._refuse("has a set or an escape that is not supported")
            self._at = found.end()
            return self._char(found[0])
        self._at += 1
        return self._char("." if char == "." else re.escape(char))

    def _char(self, source: str) -> Part:
        """One character by Python's own rules for sets, escapes and case."""
        test = self._tests.get(source)
        if test is None:
            try:
                fullmatch = re.compile(source, self._flags).fullmatch
            except re.error as error:
                self._refuse(f"is not valid: {error.msg}")
            test = self._tests[source] = lru_cache(maxsize=512)(lambda char: fullmatch(char) is not None)
        accepts = test
        return lambda after: self._regex.add_char(accepts, after)

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(why)


Part = Callable[[int], int]
