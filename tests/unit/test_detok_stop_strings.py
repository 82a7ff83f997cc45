"""The automaton against a search of the whole text, and the rules around it."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.detok.stop_strings import StopAutomaton, StopMatcher, automaton, make_matcher

_stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=5).map(tuple)


def first_completion(text: str, stops: tuple[str, ...], begin: int = 0) -> tuple[int, str] | None:
    """(end, stop) of the match that ends first after `begin`; the longest of those that end there."""
    for end in range(begin + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@pytest.mark.rule(54, 55)
@given(_stops, st.text(alphabet="abcd", max_size=40), st.data())
def test_the_first_completion_wins_for_every_chunking(stops: tuple[str, ...], text: str, data: st.DataObject) -> None:
    matcher = StopMatcher(stops)
    at = 0
    found = None
    while at < len(text) and found is None:
        size = data.draw(st.integers(1, 6))
        hit = matcher.scan(text[at : at + size])
        if hit is not None:
            found = (at + hit.end, hit.stop)
        else:
            seen = text[: at + size]
            longest = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
            assert matcher.held == longest  # no character more, none less
        at += size
    assert found == first_completion(text, stops)


@pytest.mark.rule(59)
@given(_stops, st.text(alphabet="abc", max_size=12), st.text(alphabet="abc", max_size=24))
def test_matches_before_min_tokens_do_not_count(stops: tuple[str, ...], before: str, after: str) -> None:
    """A later match may begin in the unarmed text, as long as it ends after it."""
    matcher = StopMatcher(stops)
    assert matcher.scan(before, armed=False) is None
    hit = matcher.scan(after)
    found = None if hit is None else (len(before) + hit.end, hit.stop)
    assert found == first_completion(before + after, stops, len(before))


@pytest.mark.rule(56)
def test_a_long_stop_string_holds_nothing_back_that_it_does_not_begin_with() -> None:
    matcher = StopMatcher(("Q" * 120,))
    for _ in range(40):
        assert matcher.scan(" two") is None
        assert matcher.held == 0


def test_a_match_that_did_not_count_is_not_held_back() -> None:
    matcher = StopMatcher(("ab", "bcd"))
    assert matcher.scan("xab", armed=False) is None
    assert matcher.held == 1  # "b" may go on to "bcd"; "ab" as a whole is over
    matcher = StopMatcher(("ab", "abc"))
    assert matcher.scan("xab", armed=False) is None
    assert matcher.held == 2


@pytest.mark.parametrize("stop", ["[", "]", "^", "\\", "-", "a-z", "\n", "\ufffd", "🔥", "]^-\\"])
def test_any_character_may_begin_a_stop_string(stop: str) -> None:
    hit = StopMatcher((stop,)).scan("some text " + stop + " more")
    assert hit is not None and hit.end == 10 + len(stop)


@pytest.mark.rule(56)
def test_no_character_is_looked_at_twice() -> None:
    """Failure links move back at most as often as characters moved on: linear on the text that hurts a search."""
    machine = StopAutomaton(("a" * 50 + "b",))
    moves = 0

    class Counted(dict[str, int]):
        def get(self, key: str, default: object = None) -> object:  # type: ignore[override]
            nonlocal moves
            moves += 1
            return super().get(key, default)

    machine.next = [Counted(edges) for edges in machine.next]
    state = 0
    for char in ("a" * 49 + "c") * 200:
        state = machine.step(state, char)
    assert moves <= 2 * 200 * 50 + 200


@pytest.mark.rule(58)
def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("a", ""))


@pytest.mark.rule(55)
def test_strings_and_patterns_that_end_together_are_decided_by_length() -> None:
    for stops, patterns in ((("b",), ("ab",)), (("ab",), ("b",)), (("zz",), ("b", "[a]b"))):
        matcher = make_matcher(stops, patterns)
        assert matcher is not None
        hit = matcher.scan("xab")
        assert hit is not None and (hit.end, hit.length) == (3, 2)


def test_large_automata_are_not_kept_beyond_their_requests() -> None:
    """One has 16 x 1,024 characters at most, and takes six megabytes then."""
    assert automaton(("stop", "end")) is automaton(("stop", "end"))
    large = weakref.ref(automaton(("x" * 1024, "y" * 1024)))
    gc.collect()
    assert large() is None
