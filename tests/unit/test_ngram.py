"""Prompt lookup against a reference that searches the whole text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.sched.ngram import MAX_CANDIDATES, MAX_MATCH, NgramIndex


def reference(text: list[int], shortest: int, count: int) -> list[int]:
    """Every earlier place of the newest run, latest first, compared id by id."""
    end = len(text)
    places = [p for p in range(end - 2, shortest - 2, -1) if text[p + 1 - shortest : p + 1] == text[end - shortest :]]
    if not places or count <= 0:
        return []

    def agreement(place: int) -> int:
        length = 0
        while length < MAX_MATCH and place - length >= 0 and text[place - length] == text[end - 1 - length]:
            length += 1
        return length

    best = max(places[:MAX_CANDIDATES], key=agreement)  # the first of equals: the latest
    loop = text[best + 1 :]
    return [loop[index % len(loop)] for index in range(count)]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4), st.integers(0, 9), st.integers(1, 7))
def test_proposals_are_those_of_a_full_search(text: list[int], shortest: int, count: int, stride: int) -> None:
    index = NgramIndex(shortest)
    for end in range(0, len(text) + 1, stride):
        assert index.propose(text[:end], count) == reference(text[:end], shortest, count)


def test_the_longest_match_wins_then_the_latest() -> None:
    assert NgramIndex(1).propose([1, 2, 3, 9, 2, 4, 9, 1, 2], 2) == [3, 9]
    assert NgramIndex(1).propose([2, 3, 2, 4, 2], 1) == [4]


def test_a_loop_is_drafted_past_the_end_of_the_text() -> None:
    assert NgramIndex(2).propose([7, 1, 2, 3, 1, 2, 3, 1], 7) == [2, 3, 1, 2, 3, 1, 2]
    assert NgramIndex(1).propose([5, 5], 4) == [5, 5, 5, 5]


def test_a_new_run_gives_nothing() -> None:
    index = NgramIndex(2)
    assert index.propose([], 4) == []
    assert index.propose([1], 4) == []
    assert index.propose([1, 2, 3, 2], 4) == []


class CountedList(list):
    """Counts the ids that are looked at."""

    looks = 0

    def __getitem__(self, key):
        CountedList.looks += len(range(*key.indices(len(self)))) if isinstance(key, slice) else 1
        return super().__getitem__(key)


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """Also of the worst text: one id, where every place matches and every match is long."""
    index, text = NgramIndex(3), CountedList([1] * 20_000)
    index.extend(text)
    CountedList.looks = 0
    for _ in range(10):
        text.append(1)
        assert index.propose(text, 4) == [1, 1, 1, 1]
    assert CountedList.looks <= 10 * (3 + 2 * MAX_CANDIDATES * MAX_MATCH + 4)
