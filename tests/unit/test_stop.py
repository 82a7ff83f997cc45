"""Token-level ends, one rule each."""

from __future__ import annotations

import random

import pytest

from nanoserve.ipc.messages import FinishReason, RepetitionDetection
from nanoserve.sched.stop import RepetitionWatch, Stop, find_stop, suppressed_ids
from tests.factories import make_sampling

EOS_IDS = frozenset({1, 2})
STOP, LENGTH, REPETITION = FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION


@pytest.mark.rule(59)
@pytest.mark.parametrize(
    ("new_ids", "num_before", "fields", "expected"),
    [
        ([9], 0, {}, None),
        ([1], 0, {"ignore_eos": False}, Stop(1, STOP, 1, is_eos=True)),
        ([2], 0, {"ignore_eos": False}, Stop(1, STOP, 2, is_eos=True)),
        ([1], 0, {}, None),
        ([1], 0, {"stop_token_ids": (1,)}, Stop(1, STOP, 1)),  # ignore_eos does not touch ids the client lists
        ([7], 0, {"stop_token_ids": (7,)}, Stop(1, STOP, 7)),
        ([9], 9, {}, Stop(1, LENGTH)),
        ([9], 12, {}, Stop(1, LENGTH)),  # resumed with more than it may have
        ([1], 9, {"ignore_eos": False}, Stop(1, STOP, 1, is_eos=True)),  # both at once: the better news
        ([1], 0, {"ignore_eos": False, "min_tokens": 2}, None),
        ([1], 1, {"ignore_eos": False, "min_tokens": 2}, Stop(1, STOP, 1, is_eos=True)),
        ([7], 2, {"stop_token_ids": (7,), "min_tokens": 4}, None),
        ([9], 9, {"min_tokens": 50}, Stop(1, LENGTH)),
        ([8, 7, 9, 7], 0, {"stop_token_ids": (7,)}, Stop(2, STOP, 7)),  # a row of several is cut at the first
        ([8, 9, 7], 8, {"stop_token_ids": (7,)}, Stop(2, LENGTH)),
        ([7, 7, 7], 0, {"stop_token_ids": (7,), "min_tokens": 3}, Stop(3, STOP, 7)),
    ],
)
def test_find_stop(new_ids: list[int], num_before: int, fields: dict[str, object], expected: Stop | None) -> None:
    assert find_stop(new_ids, num_before, 10, make_sampling(**fields), EOS_IDS) == expected


def test_suppressed_ids() -> None:
    assert suppressed_ids(make_sampling(stop_token_ids=(7,), ignore_eos=False), EOS_IDS) == ()
    assert suppressed_ids(make_sampling(stop_token_ids=(7,), ignore_eos=False, min_tokens=1), EOS_IDS) == (1, 2, 7)
    assert suppressed_ids(make_sampling(stop_token_ids=(7,), min_tokens=1), EOS_IDS) == (7,)


def repeats_by_the_book(ids: list[int], wanted: RepetitionDetection) -> bool:
    for size in range(wanted.min_pattern_size, wanted.max_pattern_size + 1):
        tail = ids[-size * wanted.min_count :]
        if len(tail) == size * wanted.min_count and tail == tail[:size] * wanted.min_count:
            return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_repetitions_are_those_of_the_definition(seed: int) -> None:
    draw = random.Random(seed)
    shortest = draw.randint(1, 3)
    wanted = RepetitionDetection(shortest + draw.randint(0, 5), shortest, draw.randint(2, 4))
    watch, ids, found = RepetitionWatch(wanted), [], 0
    for _ in range(400):
        again = ids[-draw.randint(1, 8) :] if draw.random() < 0.5 else [draw.randint(1, 3)]
        for token_id in again:
            ids.append(token_id)
            expected = repeats_by_the_book(ids, wanted)
            assert watch.take(token_id) == expected, ids
            found += expected
    assert 0 < found < len(ids)
    # whoever begins in the middle, with what was there, goes on as if it had been there
    resumed = RepetitionWatch(wanted, ids)
    assert [watch.take(number % 2) for number in range(40)] == [resumed.take(number % 2) for number in range(40)]


def test_a_watch_remembers_no_more_than_two_patterns() -> None:
    watch = RepetitionWatch(RepetitionDetection(4, 1, 1000))
    for number in range(500):
        watch.take(number % 3)
        assert len(watch._ids) <= 8 and len(watch._runs) <= 4


@pytest.mark.parametrize(
    ("new_ids", "num_before", "fields", "expected"),
    [
        ([7, 8, 7, 8, 9], 0, {}, Stop(4, REPETITION)),  # a row of several is cut where it repeats
        ([7, 8, 7, 8, 9], 0, {"min_tokens": 5}, None),
        ([7, 8, 7, 8, 7], 0, {"min_tokens": 5}, Stop(5, REPETITION)),
        ([7, 8, 7, 8], 0, {"stop_token_ids": (8,)}, Stop(2, STOP, 8)),
        ([7, 8, 7, 8], 0, {"stop_token_ids": (8,), "min_tokens": 4}, Stop(4, STOP, 8)),  # both at once: the better news
        ([7, 8, 7, 8], 6, {}, Stop(4, LENGTH)),
    ],
)
def test_a_repetition_ends_an_output(
    new_ids: list[int], num_before: int, fields: dict[str, object], expected: Stop | None
) -> None:
    watch = RepetitionWatch(RepetitionDetection(2, 2, 2))
    assert find_stop(new_ids, num_before, 10, make_sampling(**fields), EOS_IDS, watch) == expected
