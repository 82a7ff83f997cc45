"""A thousand requests, a third aborted, under a detokenizer that dies again and again: nothing lost, nothing left."""

from __future__ import annotations

from random import Random

import pytest

from nanoserve.engine.core import EngineCore
from nanoserve.ipc.columns import unpack_ids
from nanoserve.ipc.messages import AbortCause, AbortRequest, Finished, FinishReason, Release, Resync, TokenBatch
from tests.factories import make_add_request, make_core
from tests.fakes import FakeExecutor

VOCAB = 50


class Listener:
    """A detokenizer with the state of one life; `api` outlives it and has the ends and the ids."""

    def __init__(self, api: dict[int, list[int]], ends: dict[int, Finished]) -> None:
        self._api = api
        self._ends = ends
        self._known: dict[int, list[int]] = {}

    def hear(self, batch: TokenBatch | None) -> list[int]:
        """Returns the requests whose end reached api with this batch."""
        if batch is None:
            return []
        for opened in batch.opened:
            self._known[opened.request_id] = unpack_ids(opened.output_token_ids)
        ids, offset = unpack_ids(batch.token_ids), 0
        for request_id, first, count in zip(batch.request_ids, batch.first_index, batch.num_tokens, strict=True):
            if request_id in self._known:
                assert first == len(self._known[request_id]), "a gap or a repeat"
                self._known[request_id] += ids[offset : offset + count]
            offset += count
        released = []
        for end in batch.finished:
            if end.request_id not in self._known:
                continue  # the resync that is under way brings it again
            output = self._known.pop(end.request_id)
            before = self._api.get(end.request_id, [])
            assert output[: len(before)] == before, "api had other ids"
            self._api[end.request_id] = output
            assert end.request_id not in self._ends or self._ends[end.request_id] == end, "two different ends"
            self._ends[end.request_id] = end
            released.append(end.request_id)
        for request_id, output in self._known.items():
            before = self._api.get(request_id, [])
            assert output[: len(before)] == before[: len(output)], "api had other ids"
            self._api[request_id] = max(output, before, key=len)
        return released


def play(
    core: EngineCore, random: Random, num_requests: int
) -> tuple[dict[int, list[int]], dict[int, Finished], set[int]]:
    api: dict[int, list[int]] = {}
    ends: dict[int, Finished] = {}
    listener = Listener(api, ends)
    arrived, aborted = 0, set()
    for _ in range(20 * num_requests):
        for _ in range(random.randint(0, 4)):
            if arrived < num_requests:
                arrived += 1
                core.handle(request_for(arrived))
        live = core.scheduler.live_ids()
        if live and random.random() < 0.7:
            chosen = random.choice(live)
            aborted.add(chosen)
            core.handle(AbortRequest([chosen, chosen], AbortCause.CLIENT_GONE))
        if random.random() < 0.05:
            listener = Listener(api, ends)
            core.handle(Resync([]))
        released = listener.hear(core.take_news())
        released += listener.hear(core.step()) if core.has_work else []
        core.receive()
        if released and random.random() < 0.9:  # now and then the release is lost with its sender
            core.handle(Release(released))
        if arrived == num_requests and not core.has_work:
            break
    listener.hear(core.take_news())
    core.handle(Release(list(ends)))
    return api, ends, aborted


def request_for(request_id: int):
    random = Random(request_id)
    prompt = [2, 3, 4, 5, 6, 7, 8, 9][: random.randint(1, 8)] + [
        random.randrange(VOCAB) for _ in range(random.randint(0, 9))
    ]
    return make_add_request(
        request_id,
        prompt,
        max_tokens=random.choice([0, 1, 5, 12]),
        ignore_eos=random.random() < 0.5,
        logprobs=random.choice([None, None, 1]),
        priority=random.randint(0, 2),
    )


@pytest.mark.rule(30)
def test_a_thousand_requests_under_aborts_and_resyncs_leave_nothing() -> None:
    core = make_core(FakeExecutor(4, VOCAB), vocab_size=VOCAB, num_blocks=20, max_num_seqs=12, max_num_queued=2000)
    api, ends, aborted = play(core, Random(1), 1000)
    assert ends.keys() == set(range(1, 1001))
    assert len(aborted) > 300
    assert core.scheduler.counters.preemptions >= 5
    alone = make_core(FakeExecutor(4, VOCAB), vocab_size=VOCAB, prefix_cache=False)
    for request_id, end in ends.items():
        assert end.reason is not FinishReason.ERROR, end.failure
        assert end.num_output_tokens == len(api[request_id])
        if end.reason is FinishReason.ABORT:
            assert request_id in aborted
        else:
            alone.handle(request_for(request_id))
            solo: list[int] = []
            while alone.has_work:
                batch = alone.step()
                solo += unpack_ids(batch.token_ids) if batch else []
            assert solo == api[request_id]
    assert core.ledger.num_records == 0
    assert core.ledger.num_retained == 0
    assert not core.has_work
    core.scheduler.check_invariants()
    core.heartbeat()
