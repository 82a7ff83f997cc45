"""What the engine tells clients that wait for their first token."""

from __future__ import annotations

import pytest

from nanoserve.engine import core as engine_core
from nanoserve.ipc.messages import AbortCause, AbortRequest, Accepted
from tests.factories import make_add_request, make_core


def test_places_and_prompt_progress_until_the_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "_PROGRESS_NS", 0)  # at every step instead of every second
    core = make_core(max_num_batched_tokens=4, max_num_seqs=1)
    for request_id in (1, 2, 3):
        core.handle(make_add_request(request_id, prompt=range(5, 15), max_tokens=3))
    core.take_news()
    told = []
    for _ in range(4):
        batch = core.step()
        assert batch is not None
        told.append(batch.accepted)
    # ten prompt tokens in steps of four; two others wait all the time
    assert told[0] == [Accepted(2, 0), Accepted(3, 1), Accepted(1, 0, 4)]
    assert told[1] == [Accepted(2, 0), Accepted(3, 1), Accepted(1, 0, 8)]
    assert told[2] == told[3] == [Accepted(2, 0), Accepted(3, 1)]  # the first one has output now
    core.handle(AbortRequest([2], AbortCause.CLIENT_GONE))
    batch = core.step()
    assert batch is not None and batch.accepted == [Accepted(3, 0)]


def test_at_most_once_a_second() -> None:
    core = make_core(max_num_batched_tokens=4, max_num_seqs=1)
    core.handle(make_add_request(1, prompt=range(5, 45), max_tokens=3))
    core.handle(make_add_request(2, max_tokens=3))
    core.take_news()
    batches = [core.step() for _ in range(8)]  # the test's clock hardly moves
    assert sum(bool(batch and batch.accepted) for batch in batches) <= 1
