"""What the engine does for the whole server: probes go first, keys share, a flush is answered, ends are counted."""

from __future__ import annotations

import pytest

from nanoserve.engine.core import EngineCore
from nanoserve.ipc.messages import PROBE_PRIORITY, FinishReason, FlushCache, Pause, TokenBatch
from tests.factories import make_add_request, make_core


def finished_in_order(core: EngineCore, max_steps: int = 1000) -> list[int]:
    """Runs until nothing is left; the ids in the order of their ends."""
    ended: list[int] = []

    def hear(batch: TokenBatch | None) -> None:
        if batch is not None:
            ended.extend(end.request_id for end in batch.finished)

    for _ in range(max_steps):
        hear(core.take_news())
        if not core.has_work:
            return ended
        hear(core.step())
    raise AssertionError("no end")


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("num_batched", [2, 64])  # with 2 the streams that run take every token of a step
def test_a_probe_passes_a_full_queue_a_full_batch_and_a_long_prompt(policy: str, num_batched: int) -> None:
    core = make_core(policy=policy, max_num_seqs=2, max_num_queued=1, max_num_batched_tokens=num_batched)
    for request_id in (1, 2):
        core.handle(make_add_request(request_id, range(5, 25), max_tokens=100, share_key=f"key {request_id}"))
    core.handle(make_add_request(3, max_tokens=100, share_key="key 3"))
    for _ in range(4 if num_batched == 2 else 1):
        core.step()
    core.take_news()
    core.handle(make_add_request(4, share_key="key 4"))
    news = core.take_news()
    assert news is not None and [end.request_id for end in news.finished] == [4]  # the queue is full
    core.handle(make_add_request(9, [0], max_tokens=1, priority=PROBE_PRIORITY))
    news = core.take_news()
    assert news is not None and not news.finished
    batch = core.step()
    assert batch is not None
    assert [(end.request_id, end.reason) for end in batch.finished] == [(9, FinishReason.LENGTH)]
    assert core.scheduler.num_running <= 2 and core.scheduler.num_waiting >= 1
    core.scheduler.check_invariants()
    assert sorted(finished_in_order(core)) == [1, 2, 3]


def test_keys_share_the_engine_whatever_api_process_they_came_through() -> None:
    core = make_core(policy="fair", max_num_seqs=1, max_num_queued=99)
    for request_id in range(1, 41):
        core.handle(make_add_request(request_id, max_tokens=5, share_key="flood"))
    for request_id in range(101, 104):
        core.handle(make_add_request(request_id, max_tokens=5, share_key="modest"))
    order = finished_in_order(core)
    assert sorted(order[:7]) == [1, 2, 3, 4, 101, 102, 103]  # they take turns while both have something


def test_a_key_pays_for_what_it_used_and_not_for_what_it_might_have() -> None:
    """Most chats name no bound, so they ask for the whole context, and end after a few tokens."""
    core = make_core(policy="fair", max_num_seqs=1, max_num_queued=99)
    for turn in range(1, 4):
        core.handle(make_add_request(turn, max_tokens=100, stop_token_ids=tuple(range(100)), share_key="chat"))
        for request_id in range(100 * turn, 100 * turn + 10):
            core.handle(make_add_request(request_id, max_tokens=2, share_key="flood"))
        served: list[int] = []
        while turn not in served:
            batch = core.step()
            served += [end.request_id for end in batch.finished] if batch is not None else []
        assert len(served) <= 3, f"turn {turn} of the chat waits for {served}"


@pytest.mark.parametrize("num_seats", [2, 8, 16])
def test_a_flood_of_long_answers_does_not_hold_every_seat(num_seats: int) -> None:
    core = make_core(policy="fair", max_num_seqs=num_seats, max_num_queued=99, max_num_batched_tokens=256)
    for request_id in range(1, 41):
        core.handle(make_add_request(request_id, max_tokens=200, share_key="flood"))
    core.step()
    core.step()
    open_seats = num_seats - max(1, num_seats // 8)
    assert core.scheduler.num_running == open_seats
    core.handle(make_add_request(101, max_tokens=5, share_key="modest"))
    batch = core.step()
    assert batch is not None and 101 in batch.request_ids, "it waits for the end of a long answer"
    for request_id in range(102, 110):
        core.handle(make_add_request(request_id, max_tokens=100, share_key="another"))
    core.step()
    assert open_seats < core.scheduler.num_running <= num_seats
    assert len(finished_in_order(core, 20_000)) == 49


def test_without_fair_shares_every_seat_is_anybodys() -> None:
    core = make_core(policy="fcfs", max_num_seqs=8, max_num_queued=99)
    for request_id in range(1, 21):
        core.handle(make_add_request(request_id, max_tokens=50, share_key="flood"))
    core.step()
    assert core.scheduler.num_running == 8


def test_a_key_that_was_idle_saves_nothing_up() -> None:
    core = make_core(policy="fair", max_num_seqs=1, max_num_queued=99)
    for request_id in range(1, 41):
        core.handle(make_add_request(request_id, max_tokens=5, share_key="flood"))
    served: list[int] = []
    while len(served) < 20:
        batch = core.step()
        served += [end.request_id for end in batch.finished] if batch is not None else []
    for request_id in range(101, 111):
        core.handle(make_add_request(request_id, max_tokens=5, share_key="late"))
    order = finished_in_order(core)
    assert 4 <= sum(request_id > 100 for request_id in order[:10]) <= 6  # turns, from now on


def test_a_key_keeps_to_its_share_of_the_places() -> None:
    core = make_core(policy="fair", max_num_seqs=2, max_num_queued=8)
    for request_id in range(1, 9):
        core.handle(make_add_request(request_id, max_tokens=2, share_key="flood"))
    core.handle(make_add_request(20, max_tokens=2, share_key="modest"))
    news = core.take_news()
    assert news is not None
    refused = {end.request_id: end.failure for end in news.finished}
    assert sorted(refused) == [6, 7, 8]  # half of ten is one key's share
    assert all(failure is not None and failure.code == "queue_full" for failure in refused.values())
    finished_in_order(core)
    for request_id in range(30, 35):  # what has ended holds no place
        core.handle(make_add_request(request_id, max_tokens=2, share_key="flood"))
    news = core.take_news()
    assert news is not None and not news.finished and len(news.accepted) == 5


def test_a_new_engine_takes_back_what_waited_for_the_old_one_in_whatever_order_it_comes() -> None:
    """Two api processes hand over their requests: the key that came first may come last."""
    core = make_core(policy="fair", max_num_seqs=2, max_num_queued=10, began_ns=1000)
    for request_id in range(1, 5):
        core.handle(make_add_request(request_id, max_tokens=2, share_key="second", arrival_ns=900))
    for request_id in range(11, 17):  # six were its share while it was alone
        core.handle(make_add_request(request_id, max_tokens=2, share_key="first", arrival_ns=900))
    news = core.take_news()
    assert news is not None and not news.finished and len(news.accepted) == 10
    core.handle(make_add_request(20, max_tokens=2, share_key="first", arrival_ns=1100))
    news = core.take_news()
    assert news is not None and [end.request_id for end in news.finished] == [20]
    assert len(finished_in_order(core)) == 10


def test_a_flush_is_answered_with_the_blocks_it_forgot_and_ends_are_counted() -> None:
    core = make_core(block_size=4)
    core.handle(make_add_request(1, range(5, 18), max_tokens=1))  # three full blocks
    finished_in_order(core)
    assert core.take_news() is None
    core.handle(FlushCache())
    news = core.take_news()
    assert news is not None and news.stats is not None
    assert (news.stats.num_flushes, news.stats.flushed_blocks, news.stats.num_ended) == (1, 3, 1)
    core.handle(FlushCache())
    news = core.take_news()
    assert news is not None and news.stats is not None and news.stats.flushed_blocks == 3
    core.handle(make_add_request(2, []))  # refused: it never was admitted
    news = core.take_news()
    assert news is not None and news.stats is not None and news.stats.num_ended == 1


def test_a_paused_engine_takes_requests_and_computes_nothing() -> None:
    core = make_core()
    core.handle(make_add_request(1, max_tokens=3))
    core.step()
    core.handle(Pause(True))
    news = core.take_news()
    assert news is not None and news.stats is not None and news.stats.paused  # told at once
    core.handle(make_add_request(2, max_tokens=3))
    news = core.take_news()
    assert news is not None and [accepted.request_id for accepted in news.accepted] == [2]
    assert not core.has_work and core.heartbeat().stats is not None
    core.handle(Pause(False))
    assert not core.stats().paused
    assert core.has_work and sorted(finished_in_order(core)) == [1, 2]
