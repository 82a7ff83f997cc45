"""Bad words: the id that would complete one is never drawn."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow
torch = pytest.importorskip("torch")

from nanoserve.ipc.messages import SamplingParams  # noqa: E402
from nanoserve.runner.logit_edits import LogitEdits, apply_edits  # noqa: E402
from nanoserve.sched.plan import NewRequest  # noqa: E402


def edits(bad_words: tuple[tuple[int, ...], ...], output: list[int]) -> LogitEdits:
    request = NewRequest(1, [3, 4, *output], 2, SamplingParams(bad_words=bad_words))
    assert LogitEdits.needed(request)
    return LogitEdits(request)


def banned(edit: LogitEdits) -> list[int]:
    logits = torch.zeros(1, 10)
    apply_edits(logits, [edit], [0])
    return torch.isinf(logits[0]).nonzero().flatten().tolist()


def test_a_word_of_one_id_is_always_banned() -> None:
    edit = edits(((7,),), [])
    assert banned(edit) == [7]
    edit.append(1)
    assert banned(edit) == [7]


def test_a_longer_word_is_banned_where_it_would_be_complete() -> None:
    edit = edits(((4, 5), (1, 2, 3), (2, 6)), [])
    assert banned(edit) == []  # the prompt ends in 4, but only the output counts
    for token, expected in ((1, []), (2, [3, 6]), (4, [5]), (9, [])):
        edit.append(token)
        assert banned(edit) == expected


def test_a_resumed_request_goes_on_from_its_output() -> None:
    assert banned(edits(((1, 2, 3),), [8, 1, 2])) == [3]
