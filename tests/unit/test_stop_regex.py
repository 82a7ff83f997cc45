"""The automaton against Python's re on whole texts, and what it refuses."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.stop_regex import MAX_MATCH_CHARS, MAX_STATES, Regex, RegexMatcher, compile_regex

_atoms = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", "é", r"\.", "1", " "])
_patterns = st.recursive(
    _atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,2}", "{2,}", "{,2}", "+?"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=6,
)
_texts = st.text(alphabet="abc1. é\n", max_size=16)


def first_completion(pattern: str, text: str, begin: int = 0) -> tuple[int, int] | None:
    """(end, length) by trying every end and every beginning with `re`."""
    compiled = re.compile(pattern)
    for end in range(begin + 1, len(text) + 1):
        for start in range(end):
            if compiled.fullmatch(text, start, end):
                return end, end - start
    return None


@given(_patterns, _texts, st.integers(1, 5))
def test_the_first_completion_wins_for_every_chunking(pattern: str, text: str, size: int) -> None:
    if re.fullmatch(pattern, ""):
        with pytest.raises(ValueError, match="empty"):
            Regex(pattern)
        return
    matcher = RegexMatcher(pattern)
    found = None
    for at in range(0, len(text), size):
        hit = matcher.scan(text[at : at + size])
        if hit is not None:
            found = (at + hit.end, hit.length)
            break
        assert 0 <= matcher.held <= at + size
    assert found == first_completion(pattern, text)


@given(_patterns, _texts, _texts)
def test_matches_before_min_tokens_do_not_count(pattern: str, before: str, after: str) -> None:
    if re.fullmatch(pattern, ""):
        return
    matcher = RegexMatcher(pattern)
    assert matcher.scan(before, armed=False) is None
    hit = matcher.scan(after)
    found = None if hit is None else (len(before) + hit.end, hit.length)
    assert found == first_completion(pattern, before + after, len(before))


def test_what_may_become_a_match_is_held_and_nothing_else() -> None:
    matcher = RegexMatcher(r"</\w+>")
    for char, held in zip("a <b </an", [0, 0, 1, 0, 0, 1, 2, 3, 4], strict=True):
        assert matcher.scan(char) is None
        assert matcher.held == held


def test_case_and_dot_flags() -> None:
    assert RegexMatcher("(?i)stop").scan("a STOP") == (6, 4)
    assert RegexMatcher("(?s)a.b").scan("a\nb") == (3, 3)
    assert RegexMatcher("a.b").scan("a\nb") is None


@pytest.mark.rule(82)
@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("^a", "anchor"),
        ("a$", "anchor"),
        (r"\bword", "not supported"),
        ("(?=a)b", "not supported"),
        ("(?<=a)b", "not supported"),
        (r"(a)\1", "not supported"),
        ("a*", "empty text"),
        ("", "empty text"),
        ("a|", "empty text"),
        ("(a", "without"),
        ("a)", "too many"),
        ("[a", "not supported"),
        ("[z-a]", "bad character range"),
        ("*a", "repeats nothing"),
        ("{2}", "repeats nothing"),
        ("a**", "repeats a repetition"),
        ("a{3,2}", "wrong way round"),
        ("(?:a{99}){99}", "too large"),
        ("a" * 257, "longer than"),
        ("(" * 60 + "a" + ")" * 60, "too deeply"),
        ("\\", "not supported"),
    ],
)
def test_what_is_refused_and_why(pattern: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        compile_regex(pattern)


@pytest.mark.rule(82)
@pytest.mark.parametrize("pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*)(.*)(.*)b", "(?:a?){50}a{50}b"])
def test_no_pattern_blows_up(pattern: str) -> None:
    """Backtracking needs 2**n steps here. Ours are bounded: live states never outnumber the automaton's."""
    matcher = RegexMatcher(pattern)
    started = time.process_time()
    for _ in range(40):
        assert matcher.scan("a" * 50) is None
        assert len(matcher._live) <= MAX_STATES
        assert matcher.held <= MAX_MATCH_CHARS
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    ("pattern", "text", "hit"),
    [
        ("[ab]+c", "a" * (MAX_MATCH_CHARS + 1) + "c", MAX_MATCH_CHARS),
        ("(?s).*END", "x" * (MAX_MATCH_CHARS - 1) + "END", MAX_MATCH_CHARS),
        (r"[^\n]+\n", "x" * (2 * MAX_MATCH_CHARS + 2) + "\n", MAX_MATCH_CHARS),
        ("ab+c|b{3}", "a" + "b" * 3, 3),
        ("a" + "b" * 3 + "c*d", "abbb" + "c" * (MAX_MATCH_CHARS - 5) + "d", MAX_MATCH_CHARS),
        ("ab" + "c*d", "ab" + "c" * (MAX_MATCH_CHARS - 2) + "d", None),
    ],
)
@pytest.mark.parametrize("size", [1, 1000, 5000])
def test_a_match_in_progress_that_became_too_long_takes_no_other_with_it(
    pattern: str, text: str, hit: int | None, size: int
) -> None:
    matcher = RegexMatcher(pattern)
    found = None
    for at in range(0, len(text), size):
        found = matcher.scan(text[at : at + size])
        assert matcher.held <= MAX_MATCH_CHARS
    assert (None if found is None else found.length) == hit


@pytest.mark.parametrize(
    "pattern", ["(){999999999}b", "((((a{0}){9999999}){9999999}){9999999})b", "(?:(){99999999}){2,}b"]
)
def test_nothing_repeated_costs_nothing(pattern: str) -> None:
    """A repetition without a single state in it never meets the bound on states."""
    assert RegexMatcher(pattern).scan("ab") == (2, 1)
