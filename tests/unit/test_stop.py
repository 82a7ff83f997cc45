"""Token-level ends, one rule each."""

from __future__ import annotations

import pytest

from nanoserve.ipc.messages import FinishReason
from nanoserve.sched.stop import Stop, find_stop, suppressed_ids
from tests.factories import make_sampling

EOS_IDS = frozenset({1, 2})
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


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
