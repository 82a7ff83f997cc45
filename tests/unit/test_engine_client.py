"""The client end of the ring over a list for a channel: dispatch, idempotence, aborts, resubmission."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.api.engine_client import EngineClient, NewRequest
from nanoserve.api.stream import Outlet, RequestStream, StreamGapError
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.ids import RequestIdAllocator
from nanoserve.ipc.messages import (
    AbortCause,
    AbortRequest,
    AddRequest,
    Failure,
    Finished,
    FinishReason,
    Release,
    Resync,
    RowTokenTexts,
    SamplingParams,
    TextBatch,
    TextFinished,
    TextSpec,
    TokenText,
)


def make_client() -> tuple[EngineClient, list[Any]]:
    sent: list[Any] = []
    return EngineClient(RequestIdAllocator(2, 3), sent.append, lambda: 1), sent


def new_request() -> NewRequest:
    return NewRequest(prompt_token_ids=[1, 2], sampling=SamplingParams(seed=9), text=TextSpec(prompt_tail=(2,)))


def batch(*rows: tuple[int, str, int], incarnation: int = 1, finished: list[TextFinished] | None = None) -> TextBatch:
    """Rows of (request id, text, position); one id per character."""
    return TextBatch(
        detok_index=0,
        incarnation=1,
        engine_index=0,
        engine_incarnation=incarnation,
        step=1,
        request_ids=[row[0] for row in rows],
        deltas=[row[1] for row in rows],
        char_offset=[row[2] for row in rows],
        first_index=[row[2] for row in rows],
        num_tokens=[len(row[1]) for row in rows],
        token_ids=pack_ids(ord(char) for row in rows for char in row[1]),
        finished=finished or [],
    )


def done(request_id: int, reason: FinishReason = FinishReason.LENGTH, num_output_tokens: int = 0) -> TextFinished:
    return TextFinished(Finished(request_id=request_id, reason=reason, num_output_tokens=num_output_tokens))


@pytest.mark.rule(29, 41)
def test_rows_go_to_their_streams_and_ends_are_released_once() -> None:
    client, sent = make_client()
    first, second = (client.submit(new_request(), Outlet()) for _ in range(2))
    assert isinstance(sent[0], AddRequest) and first.request_id != second.request_id
    assert msgspec.msgpack.decode(sent[0].text_spec, type=TextSpec).prompt_tail == (2,)
    client.deliver(batch((second.request_id, "xyz", 0), (first.request_id, "ab", 0)))
    ends = [done(first.request_id), done(second.request_id)]
    client.deliver(batch((first.request_id, "c", 2), finished=ends))
    assert (first.take().text, second.take().text) == ("abc", "xyz")
    assert sent[2:] == [Release(request_ids=[first.request_id, second.request_id])]
    assert client.num_live == 0


def test_abort_is_sent_once_and_its_terminal_record_is_released() -> None:
    client, sent = make_client()
    stream = client.submit(new_request(), Outlet())
    client.abort([stream], AbortCause.CLIENT_GONE)
    client.abort([stream], AbortCause.CLIENT_GONE)
    assert sent[1:] == [AbortRequest(request_ids=[stream.request_id], cause=AbortCause.CLIENT_GONE)]
    client.deliver(batch((stream.request_id, "late", 0), finished=[done(stream.request_id, FinishReason.ABORT)]))
    assert sent[2] == Release(request_ids=[stream.request_id])
    assert (client.num_live, client.num_ending, client.counters.late_rows) == (0, 0, 1)


def test_the_detokenizers_own_end_is_given_its_prompt() -> None:
    """A stop string ends a request before the engine knows: its record comes without the engine's numbers."""
    client, _ = make_client()
    stream = client.submit(new_request(), Outlet())
    end = Finished(request_id=stream.request_id, reason=FinishReason.STOP, num_output_tokens=1)
    client.deliver(batch((stream.request_id, "a", 0), finished=[TextFinished(end, stop_string="b")]))
    finished = stream.take().finished
    assert finished is not None and finished.stop_string == "b"
    assert (finished.finished.num_prompt_tokens, finished.finished.num_output_tokens) == (2, 1)


def test_a_higher_incarnation_resubmits_what_lives_with_its_ids() -> None:
    client, sent = make_client()
    kept, ended, gone = (client.submit(new_request(), Outlet()) for _ in range(3))
    client.deliver(batch((kept.request_id, "ab", 0), finished=[done(ended.request_id)]))
    client.abort([gone], AbortCause.CLIENT_GONE)
    sent.clear()
    client.note_engine(2)
    client.note_engine(2)
    client.note_engine(1)  # late words of the old one change nothing
    assert [message.request_id for message in sent] == [kept.request_id]
    assert unpack_ids(sent[0].output_token_ids) == [ord("a"), ord("b")] and sent[0].sampling.seed == 9
    assert client.num_ending == 0  # the new engine never heard of the aborted one


@pytest.mark.parametrize(("num_ids", "with_scores", "expected"), [(3, True, 2), (3, False, 3), (80, True, 80)])
def test_ids_whose_logprobs_are_held_back_are_computed_again(num_ids: int, with_scores: bool, expected: int) -> None:
    """With their text, of half a character or of what may be a stop string; the old engine alone had the numbers."""
    client, sent = make_client()
    new = new_request()
    if with_scores:
        new = dataclasses.replace(new, sampling=msgspec.structs.replace(new.sampling, logprobs=1))
    stream = client.submit(new, Outlet())
    ids = list(range(10, 10 + num_ids))
    scored = [TokenText(token_id, "x", b"x", -1.0) for token_id in ids]
    stream.push_row("xx", 0, 0, ids, RowTokenTexts(0, scored[:2], 0) if with_scores else None)
    sent.clear()
    client.resubmit_all()
    assert unpack_ids(sent[0].output_token_ids) == ids[:expected]
    stream.push_row("x", 2, 2, ids[2:], RowTokenTexts(0, scored[2:], 2) if with_scores else None)
    piece = stream.take()
    assert piece.text == "xxx" and piece.num_output_tokens == num_ids
    assert [token.token_id for token in piece.logprobs] == (ids if with_scores else [])


def test_failure_of_the_server_ends_every_stream() -> None:
    client, _ = make_client()
    stream = client.submit(new_request(), Outlet())
    client.fail_all(Failure(503, "gone"))
    piece = stream.take()
    assert piece.finished is not None and piece.finished.finished.reason == FinishReason.ERROR
    assert client.num_live == 0


def test_a_missing_row_is_asked_for_once_and_nothing_is_taken_out_of_order() -> None:
    client, sent = make_client()
    torn, whole = (client.submit(new_request(), Outlet()) for _ in range(2))
    sent.clear()
    client.deliver(batch((torn.request_id, "ab", 0), (whole.request_id, "o", 0)))
    client.deliver(batch((torn.request_id, "e", 4), (whole.request_id, "k", 1)))  # "cd" was lost on the way
    client.deliver(batch((torn.request_id, "f", 5)))
    assert sent == [Resync(request_ids=[torn.request_id])] and client.counters.gaps == 1
    assert whole.take().text == "ok" and torn.take().text == "ab"
    client.deliver(batch((torn.request_id, "abcdef", 0)))  # told whole
    client.deliver(batch((torn.request_id, "g", 6), finished=[done(torn.request_id, num_output_tokens=7)]))
    assert torn.take().text == "cdefg" and torn.finished is not None
    assert sent[1:] == [Release(request_ids=[torn.request_id])]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.REPETITION])
def test_an_end_whose_last_rows_are_missing_is_not_taken_and_not_released(reason: FinishReason) -> None:
    client, sent = make_client()
    torn, whole = (client.submit(new_request(), Outlet()) for _ in range(2))
    sent.clear()
    ends = [done(torn.request_id, reason, num_output_tokens=3), done(whole.request_id, num_output_tokens=2)]
    client.deliver(batch((torn.request_id, "c", 2), (whole.request_id, "ok", 0), finished=ends))
    assert torn.finished is None and whole.finished is not None
    assert sent == [Release(request_ids=[whole.request_id]), Resync(request_ids=[torn.request_id])]
    client.deliver(batch((torn.request_id, "abc", 0), finished=ends[:1]))
    assert torn.take().text == "abc" and torn.finished is not None
    assert sent[2:] == [Release(request_ids=[torn.request_id])]


def test_where_the_asking_is_lost_too_it_is_repeated() -> None:
    client, sent = make_client()
    stream = client.submit(new_request(), Outlet())
    client.deliver(batch((stream.request_id, "c", 2)))
    sent.clear()
    for second in range(1, 12):
        client.ask_for_silent(second * 10**9 + 1)
        client.deliver(batch((stream.request_id, "d", 3)))  # rows that do not fit are no sign of life
    assert sent[1:] == [Resync(request_ids=[stream.request_id])]


def test_a_silent_request_is_asked_for_with_growing_patience() -> None:
    """Whatever was lost comes again: the request for an engine that never got it, its story for one that has it."""
    client, sent = make_client()
    stream = client.submit(new_request(), Outlet())
    client.deliver(batch((stream.request_id, "ab", 0)))
    sent.clear()
    asked_at = []
    for second in range(1, 60):
        client.ask_for_silent(second * 10**9 + 1)
        if sent:
            asked_at.append(second)
            again, resync = sent
            assert isinstance(again, AddRequest) and unpack_ids(again.output_token_ids) == [ord("a"), ord("b")]
            assert resync == Resync(request_ids=[stream.request_id])
            sent.clear()
    assert asked_at == [5, 15, 35] and client.counters.asked == 3
    client.deliver(batch((stream.request_id, "abc", 0)))  # as told again
    assert stream.take().text == "abc" and stream.silence.num_asked == 0
    client.ask_for_silent(300 * 10**9)  # a process that was stopped for long first reads what has come meanwhile
    assert not sent


@pytest.mark.rule(41)
def test_an_end_that_does_not_come_is_asked_for_once_more() -> None:
    client, sent = make_client()
    stream = client.submit(new_request(), Outlet())
    client.abort([stream], AbortCause.CLIENT_GONE)
    sent.clear()
    for second in range(1, 30):
        client.ask_for_silent(second * 10**9 + 1)
    ids = [stream.request_id]
    assert sent == [AbortRequest(request_ids=ids, cause=AbortCause.CLIENT_GONE), Resync(request_ids=ids)]
    assert client.num_ending == 0


def make_stream(**options: Any) -> tuple[RequestStream, Outlet]:
    outlet = Outlet()
    request = AddRequest(request_id=1, prompt_token_ids=b"", sampling=SamplingParams(), text_spec=b"")
    return RequestStream(request, outlet, **options), outlet


@pytest.mark.rule(40)
@settings(max_examples=300)
@given(
    st.text(alphabet="abcdef", max_size=20), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20), st.booleans()))
)
def test_any_delivery_with_repeats_gives_the_text_once(text: str, rows: list[tuple[int, int, bool]]) -> None:
    """Rows may overlap and repeat in any way; as long as none is missing the stream is exact."""
    stream, _ = make_stream(wants_ids=True)
    shown: list[str] = []
    ids: list[int] = []
    for start, length, take in [*rows, (0, len(text), True)]:
        start = min(start, stream.num_chars)
        part = text[start : start + length]
        stream.push_row(part, start, start, [ord(char) for char in part])
        if take:
            piece = stream.take()
            shown.append(piece.text)
            ids += piece.token_ids
    assert "".join(shown) == text
    assert ids == [ord(char) for char in text] == list(stream.output_ids)


@pytest.mark.rule(40)
def test_a_row_ahead_of_the_stream_is_a_gap() -> None:
    stream, _ = make_stream()
    stream.push_row("ab", 0, 0, [1, 2])
    for char_offset, first_index in ((3, 2), (2, 3)):
        with pytest.raises(StreamGapError):
            stream.push_row("x", char_offset, first_index, [3])


def test_logprob_entries_have_their_own_position() -> None:
    def entry(token_id: int) -> TokenText:
        return TokenText(token_id, "x", b"x", -1.0)

    stream, _ = make_stream()
    stream.push_row("", 0, 0, [10])
    stream.push_row("é", 0, 1, [11], RowTokenTexts(0, [entry(10), entry(11)], 0))
    stream.push_row("é", 0, 0, [10, 11], RowTokenTexts(0, [entry(10), entry(11)], 0))
    assert [token.token_id for token in stream.take().logprobs] == [10, 11]


async def test_writer_wakes_for_the_first_token_every_interval_and_the_end() -> None:
    stream, outlet = make_stream(interval=3)
    woken: list[str] = []

    async def write() -> None:
        while stream.finished is None or not woken or not woken[-1].endswith("."):
            for ready in await outlet.wait():
                woken.append(ready.take().text + ("." if ready.finished else ""))

    task = asyncio.create_task(write())
    for position, char in enumerate("abcdefgh"):
        stream.push_row(char, position, position, [1])
        await asyncio.sleep(0.001)
    stream.finish(done(1))
    await task
    assert woken == ["a", "bcd", "efg", "h."]


async def test_tokens_without_text_wake_nobody_unless_ids_are_wanted() -> None:
    for wants_ids in (False, True):
        stream, outlet = make_stream(wants_ids=wants_ids)
        stream.push_row("a", 0, 0, [1])
        (await outlet.wait())[0].take()
        stream.push_row("", 1, 1, [2])
        waiting = asyncio.create_task(outlet.wait())
        await asyncio.sleep(0.01)
        assert waiting.done() is wants_ids
        waiting.cancel()
