"""States that are lost - evicted, missing a row, dead with their process, of another engine - change no text."""

from __future__ import annotations

import random

import pytest

from nanoserve.config import DetokConfig
from nanoserve.detok.manager import DetokManager
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import (
    EmitMode,
    Finished,
    FinishReason,
    Opened,
    Resync,
    TextSpec,
    TokenBatch,
)
from tests.unit.detok_ring import TOKENIZER, Ring, ids_of
from tests.unit.detok_tokenizers import (
    CORPUS,
)


@pytest.mark.rule(42)
@pytest.mark.parametrize("max_states", [1, 8])
def test_a_small_cap_under_many_streams_changes_no_text(max_states: int) -> None:
    rng = random.Random(3)
    ring = Ring(TOKENIZER, max_states=max_states)
    wanted = {}
    for request_id in range(1, 65):
        text = rng.choice(CORPUS) + str(request_id)
        stop = ("zzz",) if request_id % 3 else ()
        ring.engine.add(request_id, ids_of(text), TextSpec(stop=stop, emit=EmitMode(request_id % 2)))
        wanted[request_id] = text
    ring.run()
    for request_id, text in wanted.items():
        assert ring.of(request_id).text == text
        assert ring.of(request_id).finished is not None
    assert ring.engine.num_resyncs > 100
    assert ring.detok.num_tracked == 0


@pytest.mark.rule(42)
def test_the_least_recently_used_state_is_the_one_to_go() -> None:
    ring = Ring(TOKENIZER, max_states=2)
    for request_id in (1, 2, 3):
        ring.engine.add(request_id, ids_of("The quick brown fox"), TextSpec())
    ring.step({1: 0, 2: 0, 3: 0})  # all opened in this order: 1 goes
    ring.step({1: 0, 2: 1, 3: 0})  # 2 is used again, so 3 is the oldest
    ring.step({1: 1, 2: 0, 3: 0})  # 1 has to be asked for, comes back with the next answer
    assert ring.engine.num_resyncs == 1
    ring.step({1: 0, 2: 0, 3: 0})
    ring.step({1: 0, 2: 1, 3: 0})
    assert ring.engine.num_resyncs == 1  # 2 was never lost


@pytest.mark.rule(40, 42)
def test_a_gap_is_asked_for_and_a_repeat_is_dropped() -> None:
    ring = Ring(TOKENIZER)
    ids = ids_of(CORPUS[3])
    ring.engine.add(1, ids, TextSpec())
    for at in range(6):
        ring.step(drain=at != 3)
        if at == 3:
            ring._waiting.clear()  # lost on the way
    assert ring.engine.num_resyncs == 1
    again = TokenBatch(0, 1, 50, request_ids=[1], first_index=[0], num_tokens=[3], token_ids=pack_ids(ids[:3]))
    ring._waiting.append(again)
    ring.run()
    assert ring.of(1).text == CORPUS[3] and ring.of(1).ids == ids


@pytest.mark.rule(40)
@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.REPETITION])
def test_a_lost_last_row_is_noticed_by_its_count(reason: FinishReason) -> None:
    ring = Ring(TOKENIZER)
    ring.engine.add(1, ids_of("The quick"), TextSpec())
    ring.step()
    script = ring.engine.scripts[1]
    script.sent = len(script.token_ids)
    script.finished = Finished(1, reason, num_output_tokens=script.sent)
    ring._waiting.append(TokenBatch(0, 1, 9, finished=[script.finished]))
    ring.drain()
    assert ring.of(1).finished is None
    ring.run()
    assert ring.of(1).text == "The quick" and ring.of(1).num_finished == 1


@pytest.mark.parametrize("at", [0, 1, 5, 20])
def test_a_detokenizer_that_dies_loses_nothing(at: int) -> None:
    ring = Ring(TOKENIZER)
    for request_id in range(1, 30):
        stop = ("lazy",) if request_id % 2 else ()
        ring.engine.add(
            request_id, ids_of(CORPUS[request_id % 6]), TextSpec(stop=stop, emit=EmitMode(request_id % 3 == 0))
        )
    for _ in range(at):
        ring.step()
    ring.step(drain=False)  # this batch dies with it
    ring.restart_detok()
    ring.run()
    for request_id in range(1, 30):
        text = CORPUS[request_id % 6]
        wanted = text.split("lazy")[0] if request_id % 2 else text
        assert ring.of(request_id).text == wanted
        assert ring.of(request_id).finished is not None
    assert ring.detok.num_tracked == 0


def test_a_new_engine_opens_again_what_lives_and_the_dead_one_is_not_heard() -> None:
    ids = ids_of(CORPUS[0])
    ring = Ring(TOKENIZER)
    ring.engine.add(1, ids, TextSpec())
    for _ in range(10):
        ring.step()
    spec = ring.engine.scripts[1].spec
    old = TokenBatch(0, 1, 11, request_ids=[1], first_index=[10], num_tokens=[1], token_ids=pack_ids([7]))
    new = TokenBatch(
        0, 2, 1, opened=[Opened(1, spec, pack_ids(ids[:8]))],
        request_ids=[1], first_index=[8], num_tokens=[len(ids) - 8], token_ids=pack_ids(ids[8:]),
        finished=[Finished(1, FinishReason.LENGTH, num_output_tokens=len(ids))],
    )  # fmt: skip
    output = ring.detok.process([new, old])
    assert output.text_batches[0].engine_incarnation == 2
    ring.api.take(output.text_batches[0])
    assert ring.of(1).text == CORPUS[0] and ring.of(1).num_finished == 1
    assert ring.detok.num_tracked == 0


def test_a_new_engine_makes_old_states_void() -> None:
    """Only what it opens lives on; a row that goes on with an old state is a gap like any other."""
    ring = Ring(TOKENIZER)
    for request_id in (1, 2):
        ring.engine.add(request_id, ids_of("The quick brown fox"), TextSpec())
    ring.step()
    ring.step()
    row = TokenBatch(0, 2, 1, request_ids=[2], first_index=[1], num_tokens=[1], token_ids=pack_ids([7]))
    output = ring.detok.process([row])
    assert output.to_engine == [Resync([2])]
    assert not output.text_batches and ring.detok.num_states == 0


def test_a_restart_asks_for_everything_once() -> None:
    manager = DetokManager(TOKENIZER, DetokConfig(), incarnation=2)
    assert manager.resync_all() == Resync(request_ids=[], detok_index=0)
    row = TokenBatch(0, 1, 5, request_ids=[1], first_index=[4], num_tokens=[1], token_ids=pack_ids([9]))
    assert manager.process([row]).to_engine == []  # comes with the answer
