"""Fair queueing by key, played against a queue that serves one request at a time."""

from __future__ import annotations

import heapq
from itertools import count

import pytest

from nanoserve.errors import RequestError
from nanoserve.sched.fairness import FairClock, FairShares


def play(arrivals: list[tuple[int, str, int]]) -> dict[str, list[int]]:
    """Arrivals of (time, key, tokens), one token a tick, lowest tag first; returns each key's waiting times."""
    clock = FairClock()
    order = count()
    queue: list[tuple[int, int, int, str, int]] = []
    waited: dict[str, list[int]] = {}
    now, pending = 0, sorted(arrivals)
    while pending or queue:
        while pending and pending[0][0] <= now:
            arrived, key, tokens = pending.pop(0)
            heapq.heappush(queue, (clock.tag(key, tokens), next(order), arrived, key, tokens))
        if not queue:
            now = pending[0][0]
            continue
        tag, _, arrived, key, tokens = heapq.heappop(queue)
        clock.started(tag)
        waited.setdefault(key, []).append(now - arrived)
        now += tokens
    return waited


def test_a_flood_does_not_starve_a_modest_key() -> None:
    flood = [(0, "flood", 10) for _ in range(500)]
    modest = [(100 * i, "modest", 10) for i in range(40)]
    waited = play(flood + modest)
    assert max(waited["modest"]) <= 20  # what runs, and one more
    assert max(waited["flood"]) > 4000


def test_equal_keys_get_equal_shares_whatever_the_size_of_their_requests() -> None:
    waited = play([(0, "big", 100) for _ in range(50)] + [(0, "small", 10) for _ in range(500)])
    assert abs(max(waited["big"]) - max(waited["small"])) <= 200


def test_an_idle_key_saves_nothing_up() -> None:
    clock = FairClock()
    for _ in range(100):
        clock.started(clock.tag("busy", 10))
    assert clock.tag("late", 10) >= clock.tag("busy", 10) - 20


def test_a_single_key_is_served_in_order() -> None:
    clock = FairClock()
    tags = [clock.tag("", 10) for _ in range(10)]
    assert tags == sorted(tags) and len(set(tags)) == 10


def test_a_flood_leaves_places_to_others_and_they_come_back() -> None:
    shares = FairShares(num_places=12)
    for request_id in range(6):
        shares.admit(request_id, "flood", 10)
    with pytest.raises(RequestError) as refused:
        shares.admit(6, "flood", 10)
    assert (refused.value.status, refused.value.code) == (503, "queue_full")
    for request_id in range(10, 14):  # a third of the places for each of two
        shares.admit(request_id, "modest", 10)
    with pytest.raises(RequestError):
        shares.admit(14, "modest", 10)
    shares.admit(7, "flood", 10, resumed=True)
    for request_id in (*range(8), *range(10, 14)):
        shares.end(request_id, 10)
        shares.end(request_id, 10)
    assert not shares._held and not shares._keys
    shares.admit(20, "flood", 10)


def test_one_request_of_many_may_pass_the_share() -> None:
    shares = FairShares(num_places=4)
    for request_id in range(10):
        shares.admit(request_id, "a", 1, num_siblings=10)
    with pytest.raises(RequestError):
        shares.admit(10, "a", 1)


def test_what_was_not_used_is_given_back_and_the_order_within_a_key_stays() -> None:
    shares = FairShares(num_places=100)
    tags = [shares.admit(request_id, "chat", 1000) for request_id in range(4)]
    assert tags == [0, 1000, 2000, 3000]
    shares.end(0, 10)
    shares.end(1, 1000)
    shares.end(2, 0)
    tags = [shares.admit(request_id, "chat", 50) for request_id in (4, 5)]
    assert tags == [3000, 3000]  # 2010 and 2060, but not before the one that waits
    for request_id in (3, 4, 5):
        shares.end(request_id, 10)
    assert shares.admit(6, "chat", 1000) == 1040
    shares.admit(7, "other", 5)
    shares.started(6)
    assert shares.admit(8, "new", 5) == 1040
