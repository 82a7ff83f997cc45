"""The detokenizer between a scripted engine and a strict api: chunkings, ends, faults, bookkeeping."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.config import DetokConfig
from nanoserve.detok.manager import DetokManager
from nanoserve.errors import StartupError
from nanoserve.ipc.messages import (
    AbortCause,
    Accepted,
    EmitMode,
    EngineStats,
    Finished,
    FinishReason,
    Opened,
    RowLogprobs,
    TextSpec,
    TokenBatch,
)
from tests.unit.detok_ring import TOKENIZER, Ring, byte_ids, ids_of, run_one
from tests.unit.detok_tokenizers import (
    CORPUS,
    FAMILIES,
    POISON,
    Breaking,
    gemma_like,
    llama2,
    reference,
)


@pytest.mark.parametrize("kind", ["bytes", "window"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_many_streams_in_mixed_batches_are_each_exact(family: str, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    tokenizer = FAMILIES[family]()
    ring = Ring(tokenizer, detokenizer=kind)
    wanted: dict[int, str] = {}
    for request_id in range(1, 9):
        text = rng.choice(CORPUS)[rng.randrange(20) :]
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        token_ids = [rng.randrange(tokenizer.vocab_size) if rng.random() < 0.2 else i for i in token_ids]
        spec = TextSpec(
            emit=rng.choice(list(EmitMode)),
            skip_special_tokens=rng.random() < 0.5,
            prompt_tail=tuple(rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(6))),
        )
        ring.engine.add(request_id, token_ids, spec)
        wanted[request_id] = reference(tokenizer, token_ids, list(spec.prompt_tail), skip=spec.skip_special_tokens)
    while not ring.engine.is_done:
        sizes = {request_id: rng.randrange(4) for request_id in wanted}
        ring.step(sizes, drain=rng.random() < 0.6)
    ring.drain()
    for request_id, text in wanted.items():
        got = ring.of(request_id)
        assert got.text == text
        assert got.ids == ring.engine.scripts[request_id].token_ids
        assert got.num_finished == 1
        assert got.finished is not None and got.finished.finished.reason is FinishReason.LENGTH
    assert ring.detok.num_tracked == 0


@pytest.mark.rule(52)
def test_the_first_token_is_text_at_once_and_every_ascii_token_after_it() -> None:
    ring = Ring(TOKENIZER)
    ids = ids_of("The quick brown fox jumps")
    ring.engine.add(1, ids, TextSpec())
    for at in range(len(ids)):
        ring.step()
        assert ring.of(1).text == TOKENIZER.decode(ids[: at + 1])


def test_final_mode_is_one_text_at_the_end_with_ids_on_the_way() -> None:
    ids = ids_of(CORPUS[4])
    ring = run_one(ids, TextSpec(emit=EmitMode.FINAL))
    got = ring.of(1)
    assert [delta for delta in got.deltas if delta] == [TOKENIZER.decode(ids)]
    assert got.ids == ids


@pytest.mark.rule(47)
def test_held_bytes_are_flushed_once_at_the_end() -> None:
    for emit in EmitMode:
        assert run_one(ids_of("ab") + byte_ids(b"\xf0\x9f"), TextSpec(emit=emit)).of(1).text == "ab\ufffd"


@pytest.mark.rule(59)
def test_the_final_stop_id_is_no_text_unless_asked_for() -> None:
    word = ids_of(" day")
    spec = TextSpec(skip_special_tokens=False)
    for stop_id in (word[-1], TOKENIZER.token_to_id("</s>")):
        assert stop_id is not None
        ids = [*ids_of("Good"), *word[:-1], stop_id]
        got = run_one(ids, spec, stop_token_id=stop_id).of(1)
        assert got.text == TOKENIZER.decode(ids[:-1], skip_special_tokens=False)
        assert got.ids == ids
        assert got.finished is not None and got.finished.finished.stop_token_id == stop_id
        shown = TextSpec(skip_special_tokens=False, include_stop_str_in_output=True)
        assert run_one(ids, shown, stop_token_id=stop_id).of(1).text == TOKENIZER.decode(ids, skip_special_tokens=False)


# ---- faults, odd requests, bookkeeping -------------------------------------------------------------------


@pytest.mark.rule(11, 50)
def test_an_id_outside_the_vocabulary_ends_that_request_alone() -> None:
    ring = Ring(TOKENIZER)
    good = ids_of("The quick brown fox")
    ring.engine.add(1, [*ids_of("The"), TOKENIZER.vocab_size, 5], TextSpec())
    ring.engine.add(2, good, TextSpec())
    ring.engine.add(3, [*ids_of("The"), -5, 5], TextSpec())
    ring.run()
    for request_id in (1, 3):
        got = ring.of(request_id)
        assert got.finished is not None and got.num_finished == 1
        assert got.finished.finished.reason is FinishReason.ERROR
        assert got.finished.finished.failure is not None and got.finished.finished.failure.status == 500
    assert ring.of(2).text == "The quick brown fox"
    assert {abort.cause for abort in ring.engine.aborts} == {AbortCause.TEXT_FAILED}
    assert ring.detok.num_tracked == 0


@pytest.mark.rule(50)
def test_a_tokenizer_that_panics_ends_the_request_alone_that_has_such_a_token() -> None:
    """Also where the token is only the prompt's, or only a name beside a logprob."""
    ring = Ring(Breaking(TOKENIZER), detokenizer="auto")
    fox = ids_of("The quick brown fox")
    scores = [RowLogprobs(0, [-1.0], [0], [[POISON]], [[-2.0]]) for _ in fox]
    ring.engine.add(1, [*ids_of("The"), POISON, 5], TextSpec())
    ring.engine.add(2, fox, TextSpec(prompt_tail=(POISON,)))
    ring.engine.add(3, fox, TextSpec(), scores=scores)
    ring.run()
    assert ring.detok.decoder_name == "window"
    end = ring.of(1).finished
    assert end is not None and end.finished.reason is FinishReason.ERROR
    assert [ring.of(i).text for i in (2, 3)] == ["The quick brown fox"] * 2
    assert len(ring.of(3).entries) == len(fox)


def test_text_options_that_cannot_be_read_are_that_requests_error() -> None:
    manager = DetokManager(TOKENIZER, DetokConfig())
    output = manager.process([TokenBatch(0, 1, 1, opened=[Opened(1, b"\xff"), Opened(2, b"\x90")])])
    (record,) = output.text_batches[0].finished
    assert record.finished.request_id == 1 and record.finished.reason is FinishReason.ERROR


def test_ids_only() -> None:
    for ring, spec in ((Ring(TOKENIZER), TextSpec(detokenize=False)), (Ring(None), TextSpec())):
        ring.engine.add(1, [3, 4, 100_000], spec)
        ring.run()
        assert ring.of(1).text == "" and ring.of(1).ids == [3, 4, 100_000]
        assert ring.of(1).num_finished == 1 and ring.detok.num_tracked == 0


def test_a_refusal_without_an_opening_reaches_api() -> None:
    manager = DetokManager(TOKENIZER, DetokConfig())
    refused = Finished(5, FinishReason.ERROR)
    output = manager.process([TokenBatch(0, 1, 1, finished=[refused])])
    assert [record.finished for record in output.text_batches[0].finished] == [refused]
    assert not output.to_engine and manager.num_tracked == 0


def test_rows_go_to_the_api_that_owns_them_and_stats_to_all() -> None:
    manager = DetokManager(TOKENIZER, DetokConfig(), num_apis=2, detok_index=1, incarnation=4)
    second = (1 << 55) | 7
    batch = TokenBatch(
        0, 3, 9, accepted=[Accepted(second, 2)], opened=[Opened(second, b"\x90")], stats=EngineStats(steps=9)
    )
    output = manager.process([batch])
    assert sorted(output.text_batches) == [0, 1]
    for index, text in output.text_batches.items():
        assert (text.detok_index, text.incarnation, text.engine_incarnation, text.step) == (1, 4, 3, 9)
        assert text.engine_stats == EngineStats(steps=9) and text.detok_stats is not None
        assert [accepted.request_id for accepted in text.accepted] == ([second] if index else [])
    lag = manager.process([TokenBatch(0, 3, 10), TokenBatch(0, 3, 11, stats=EngineStats())])
    stats = lag.text_batches[0].detok_stats
    assert stats is not None and stats.lag_steps == 2 and stats.num_states == 1
    assert manager.process([]).text_batches == {}


@pytest.mark.rule(42)
def test_a_thousand_requests_with_aborts_leave_nothing() -> None:
    rng = random.Random(11)
    ring = Ring(TOKENIZER, max_states=64)
    for request_id in range(1, 1001):
        stop = ("yes", "é") if request_id % 4 == 0 else ()
        ring.engine.add(request_id, ids_of(rng.choice(CORPUS))[: rng.randrange(1, 40)], TextSpec(stop=stop))
    for _ in range(60):
        ring.step({request_id: rng.randrange(3) for request_id in ring.engine.scripts})
        for request_id in rng.sample(list(ring.engine.scripts), 6):
            script = ring.engine.scripts[request_id]
            if script.opened and script.finished is None:
                script.finished = Finished(request_id, FinishReason.ABORT, num_output_tokens=script.sent)
                ring._ended.append(script.finished)
    ring.run()
    assert ring.detok.num_tracked == 0
    assert all(got.finished is not None for got in ring.api.received.values())
    assert len(ring.api.received) == 1000


def test_bytes_are_refused_where_they_are_not_proved() -> None:
    with pytest.raises(StartupError, match="--detokenizer bytes"):
        DetokManager(TOKENIZER, DetokConfig(detokenizer="bytes"), table=None)
    assert DetokManager(TOKENIZER, DetokConfig(), table=None).decoder_name == "window"
    assert DetokManager(llama2(), DetokConfig()).decoder_name == "bytes"
    assert DetokManager(gemma_like(), DetokConfig(detokenizer="window")).decoder_name == "window"
