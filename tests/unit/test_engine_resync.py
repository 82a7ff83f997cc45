"""What the engine tells again: to a detokenizer that begins anew, after lost releases, of resumed requests."""

from __future__ import annotations

import pytest

from nanoserve.engine.ledger import Ledger
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.messages import AbortCause, AbortRequest, Finished, FinishReason, Release, Resync, TokenBatch
from tests.factories import make_add_request
from tests.unit.engine_ear import Ear, core_with, run


@pytest.mark.rule(41, 42)
def test_resync_tells_live_and_unreleased_requests_whole() -> None:
    core, _ = core_with(
        make_add_request(1, max_tokens=3), make_add_request(2, max_tokens=9), make_add_request(3, [100])
    )
    ear = Ear()
    for _ in range(5):
        ear.hear(core.take_news())
        ear.hear(core.step())
    core.handle(Resync([]))
    again = Ear()
    run(core, again)
    assert again.outputs.keys() == {1, 2, 3}
    assert again.outputs[1] == ear.outputs[1]
    assert again.outputs[2][:5] == ear.outputs[2]
    assert len(again.outputs[2]) == 9
    assert [again.finished[i].reason for i in (1, 2, 3)] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.ERROR,
    ]
    core.handle(Release([1, 2, 3]))
    assert core.ledger.num_records == 0
    core.handle(Resync([]))
    assert core.take_news() is None


def test_race_resync_during_a_step_is_told_after_it() -> None:
    core, executor = core_with(make_add_request(1, max_tokens=6, logprobs=1))
    executor.during_step = lambda plan: core.handle(Resync([])) if plan.step == 3 else None
    for _ in range(3):
        core.step()
    news_ear = Ear()
    run(core, news_ear)
    assert len(news_ear.outputs[1]) == 6


def test_resync_before_admission_was_told_tells_it_once() -> None:
    core, _ = core_with(make_add_request(1), make_add_request(2, [100]), Resync([]))
    news = core.take_news()
    assert news is not None
    assert [opened.request_id for opened in news.opened] == [1, 2]
    assert [end.request_id for end in news.finished] == [2]


def test_resync_brings_scores_back() -> None:
    core, _ = core_with(make_add_request(1, range(2, 8), max_tokens=4, logprobs=1, prompt_logprobs=0))
    first: list[TokenBatch] = []
    while core.has_work:
        batch = core.step()
        first += [batch] if batch else []
    core.handle(Resync([1]))
    again = core.take_news()
    assert again is not None
    assert again.first_index == [0]
    assert again.token_ids == b"".join(batch.token_ids for batch in first)
    logprobs = [value for batch in first for row in batch.logprobs for value in row.logprobs]
    assert again.logprobs[0].logprobs == logprobs
    assert again.prompt_logprobs == [prompt for batch in first for prompt in batch.prompt_logprobs]
    assert len(again.prompt_logprobs[0].scores.logprobs) == 6
    assert again.prompt_logprobs[0].scores.logprobs[0] is None


def test_resync_of_a_resumed_request_with_scores() -> None:
    core, _ = core_with(make_add_request(1, output=[50, 51], max_tokens=4, logprobs=0))
    core.take_news()
    core.step()
    core.handle(Resync([1]))
    again = core.take_news()
    assert again is not None
    assert again.opened[0].output_token_ids == pack_ids([50, 51])
    assert (again.first_index, again.num_tokens) == ([2], [1])


def test_race_release_before_the_stop_string_reaches_the_engine() -> None:
    """api has the terminal record (the stop string fired) before the engine knows: it ends and leaves nothing."""
    core, _ = core_with(make_add_request(1, max_tokens=50))
    core.take_news()
    core.step()
    core.handle(Release([1]))
    core.handle(AbortRequest([1], AbortCause.STOP_STRING, [1]))
    news = core.take_news()
    assert news is not None
    assert [end.request_id for end in news.finished] == [1]
    assert core.ledger.num_records == 0
    assert core.scheduler.num_running == 0


def test_release_of_a_request_that_runs_ends_it() -> None:
    """The detokenizer that fired the stop string died before it told the engine: nobody waits for more."""
    core, executor = core_with(make_add_request(1, max_tokens=50))
    core.take_news()
    core.step()
    core.handle(Release([1]))
    while core.has_work:
        core.step()
    assert len(executor.steps_with(1)) == 1
    assert core.ledger.num_records == 0


def test_what_is_never_released_is_bounded() -> None:
    ledger = Ledger(max_retained=3)
    for request_id in range(10):
        ledger.open(request_id, b"", [], with_scores=False)
        ledger.finish(Finished(request_id, FinishReason.LENGTH))
    assert (ledger.num_records, ledger.num_retained) == (3, 3)
    assert 9 in ledger


def test_a_lost_release_is_made_good_by_telling_the_end_again() -> None:
    core, _ = core_with(make_add_request(1, max_tokens=3), make_add_request(2, max_tokens=3))
    ear = Ear()
    run(core, ear)
    core.handle(Release([2]))
    told_at = []
    for second in range(1, 1000):
        core._clock = lambda now=second * 10**9: now
        core.heartbeat()
        if core.has_work:
            told_at.append(second)
            again = Ear()
            run(core, again)
            assert again.outputs == {1: ear.outputs[1]} and again.finished.keys() == {1}
    assert told_at == [11, 21, 41, 81, 161]
    assert core.ledger.num_records == 0


def test_lost_releases_are_noticed_by_a_busy_engine_too() -> None:
    core, _ = core_with(make_add_request(1, max_tokens=3))
    run(core, Ear())
    core.handle(make_add_request(2, max_tokens=5))
    core._clock = lambda: 20 * 10**9
    again = Ear()
    run(core, again)
    assert again.finished.keys() == {1, 2}


def test_resumed_requests_continue_and_say_so() -> None:
    core, _ = core_with(make_add_request(1, max_tokens=8))
    whole = Ear()
    run(core, whole)
    fresh, _ = core_with(make_add_request(1, max_tokens=8, output=whole.outputs[1][:5]))
    resumed = Ear()
    news = fresh.take_news()
    assert news is not None
    assert unpack_ids(news.opened[0].output_token_ids) == whole.outputs[1][:5]
    resumed.hear(news)
    run(fresh, resumed)
    assert resumed.outputs[1] == whole.outputs[1]


# ---- stats --------------------------------------------------------------------------------------------------
