"""The api process against a peer that plays the ring: life cycle, first frame, hang-ups, errors, idempotence."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nanoserve.config import ApiConfig, ServerConfig
from nanoserve.ipc.columns import unpack_ids
from nanoserve.ipc.messages import AbortCause, Accepted, AddRequest, FinishReason, ProcessFacts
from tests.integration.api_ring import (
    Api,
    idle,
    loaded_api,
    parse_events,
    running_api,
    write_model,
)
from tests.integration.event_reader import EventReader

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.mark.rule(2, 77)
async def test_answers_while_loading_and_turns_ready_with_the_ring(tmp_path: Path) -> None:
    async with running_api() as api:
        api.ring.status(stage="loading weights", progress=0.5)
        while (await api.get("/ready"))[1]["stage"] != "loading weights":
            await asyncio.sleep(0.01)
        assert api.link.ready_calls == [False]
        assert (await api.get("/health"))[0] == 200
        status, body = await api.get("/ready")
        assert (status, body["progress"]) == (503, 0.5)
        async with api.http.post(api.url + COMPLETIONS, json={"prompt": "x"}) as response:
            assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == 503
        api.load(write_model(tmp_path))
        await api.until_ready()
        assert api.link.ready_calls == [False, True]
        assert len(api.ring.added) == 1 and api.ring.added[0].sampling.max_tokens == 1
        await api.ring.until(lambda: api.ring.released == [api.ring.added[0].request_id])


@pytest.mark.rule(65, 67, 72)
async def test_first_frame_reaches_the_client_when_one_token_exists(api: Api) -> None:
    api.ring.script = idle
    async with asyncio.timeout(10):
        request = asyncio.create_task(
            api.http.post(api.url + CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": True})
        )
        add = await api.ring.next_added()
        await asyncio.sleep(0.05)
        assert not request.done()  # accepted, but nothing to say yet: no status line
        api.ring.token(add.request_id, "A")  # the gate: exactly one token exists from here on
        response = await request
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Accel-Buffering"] == "no" and response.headers["Cache-Control"] == "no-cache"
        reader = EventReader(response)
        lines = [await reader.next_json() for _ in range(2)]
        assert lines[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert lines[1]["choices"][0]["delta"] == {"content": "A"}
        assert api.ring.sent[add.request_id] == 1
        api.ring.finish(add.request_id)
        assert (await reader.rest_json())[0]["choices"][0]["finish_reason"] == "length"


@pytest.mark.rule(73)
async def test_hang_up_while_streaming_aborts_at_once(api: Api) -> None:
    api.ring.script = idle
    body = {"prompt": "x", "max_tokens": 50, "stream": True}
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
    add = await api.ring.next_added()
    api.ring.token(add.request_id, "a")
    response = await request
    reader = EventReader(response)
    assert (await reader.next_json())["choices"][0]["text"] == "a"
    api.ring.token(add.request_id, "b")
    assert (await reader.next_json())["choices"][0]["text"] == "b"
    response.close()
    await api.ring.until(lambda: api.ring.aborted)  # no further token was needed to notice
    assert api.ring.aborted[0].request_ids == [add.request_id]
    assert api.ring.aborted[0].cause == AbortCause.CLIENT_GONE
    assert api.process.context.client.num_live == 0
    api.ring.token(add.request_id, "late")
    api.ring.finish(add.request_id, FinishReason.ABORT)
    await api.ring.until(lambda: add.request_id in api.ring.released)
    assert api.process.context.client.num_ending == 0
    assert api.process.context.client.counters.late_rows == 1


@pytest.mark.rule(73)
@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_before_the_first_token_aborts(api: Api, stream: bool) -> None:
    api.ring.script = idle
    body = {"prompt": "x", "max_tokens": 5, "stream": stream}
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
    add = await api.ring.next_added()
    request.cancel()
    await api.ring.until(lambda: api.ring.aborted)
    assert api.ring.aborted[0].request_ids == [add.request_id]
    assert api.process.context.admission.num_held == 0 or await _settled(api)


async def _settled(api: Api) -> bool:
    for _ in range(100):
        if api.process.context.admission.num_held == 0:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.mark.rule(65)
async def test_refusal_by_the_engine_is_a_status_even_when_streaming(api: Api) -> None:
    api.ring.auto_accept = False
    api.ring.script = lambda add: api.ring.refuse(add.request_id, 400, "This can never fit.")
    status, body = await api.post(COMPLETIONS, {"prompt": "x", "stream": True})
    assert status == 400
    assert body["error"] == {
        "message": "This can never fit.",
        "type": "invalid_request_error",
        "param": None,
        "code": 400,
    }


@pytest.mark.rule(14)
async def test_retry_after_of_a_full_engine_follows_the_measured_rate(api: Api) -> None:
    for _ in range(4):
        await api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
        await asyncio.sleep(0.05)
    api.ring.stats(num_waiting=10_000)
    while api.process.context.metrics.engine_stats.num_waiting != 10_000:
        await asyncio.sleep(0.01)
    api.ring.script = lambda add: api.ring.refuse(add.request_id, 503, "The queue is full.")
    async with api.http.post(api.url + COMPLETIONS, json={"prompt": "x"}) as response:
        assert response.status == 503 and int(response.headers["Retry-After"]) == 60
    api.ring.stats(num_waiting=2)
    while api.process.context.metrics.engine_stats.num_waiting != 2:
        await asyncio.sleep(0.01)
    async with api.http.post(api.url + COMPLETIONS, json={"prompt": "x"}) as response:
        assert int(response.headers["Retry-After"]) <= 2


@pytest.mark.rule(70)
async def test_failure_after_the_first_byte_is_an_event_then_done(api: Api) -> None:
    api.ring.script = idle
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": True}))
    add = await api.ring.next_added()
    api.ring.token(add.request_id, "ab")
    response = await request
    api.ring.refuse(add.request_id, 500, "The row broke.")
    events = parse_events(await response.content.read())
    assert events[0]["choices"][0]["text"] == "ab"
    assert events[-1]["error"] == {"message": "The row broke.", "type": "server_error", "param": None, "code": 500}
    # the connection stays usable and the other requests are untouched
    api.ring.script = api.ring.finish_at_once
    assert (await api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}))[1]["choices"][0]["text"] == "aa"


@pytest.mark.rule(40)
async def test_repeats_are_dropped_and_a_gap_is_asked_for(api: Api) -> None:
    def script(add: AddRequest) -> None:
        rid = add.request_id
        api.ring.token(rid, "abc")
        api.ring.token(rid, "abcd", at=0)  # a restarted detokenizer says it all again
        api.ring.token(rid, "cde", at=2)
        api.ring.finish(rid)

    api.ring.script = script
    events = await api.events(COMPLETIONS, {"prompt": "x", "stream": True, "return_token_ids": True})
    assert "".join(e["choices"][0]["text"] for e in events) == "abcde"
    ids = [i for e in events for i in e["choices"][0].get("token_ids", [])]
    assert ids == [ord(c) for c in "abcde"]

    def gap(add: AddRequest) -> None:
        api.ring.token(add.request_id, "ab")
        api.ring.token(add.request_id, "ef", at=4)
        api.ring.finish(add.request_id)

    def retell(request_id: int) -> None:
        api.ring.token(request_id, "abcdef", at=0)
        api.ring.finish(request_id)

    api.ring.script, api.ring.retell = gap, retell
    events = await api.events(COMPLETIONS, {"prompt": "x", "stream": True})
    assert "".join(e["choices"][0]["text"] for e in events) == "abcdef"
    assert api.process.context.client.counters.gaps == 1 and not api.ring.aborted


async def test_a_new_engine_gets_live_requests_with_their_ids(api: Api) -> None:
    api.ring.script = idle
    body = {"prompt": "x", "max_tokens": 5, "stream": True, "temperature": 1.0}
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
    add = await api.ring.next_added()
    api.ring.token(add.request_id, "ab")
    reader = EventReader(await request)
    await reader.next()
    api.ring.engine_incarnation = 2
    api.ring.status(stage="ready", processes=[ProcessFacts("engine-0", 1, 2, "ready")])
    await api.ring.until(lambda: len(api.ring.added) == 3)
    again = api.ring.added[2]
    assert again.request_id == add.request_id and again.sampling == add.sampling
    assert unpack_ids(again.output_token_ids) == [ord("a"), ord("b")]
    api.ring.token(add.request_id, "abcde", at=0)
    api.ring.finish(add.request_id)
    events = await reader.rest_json()
    assert "".join(e["choices"][0]["text"] for e in events) == "cde"


@pytest.mark.rule(70)
async def test_failed_server_ends_every_stream(api: Api) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": True}))
    reader = EventReader(await request)
    await reader.next()
    api.ring.status(stage="failed", failed="engine-0 crashed too often")
    events = await reader.rest_json()
    assert events[-1]["error"]["code"] == 503
    assert (await api.post(COMPLETIONS, {"prompt": "x"}))[0] == 503
    assert (await api.get("/health"))[0] == 503


@pytest.mark.rule(76)
async def test_drain_lets_streams_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async with loaded_api(tmp_path) as api:
        api.ring.script = idle
        request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": True}))
        add = await api.ring.next_added()
        api.ring.token(add.request_id, "ab")
        response = await request
        api.link.stop()
        while (await api.get("/ready"))[0] == 200:
            await asyncio.sleep(0.01)
        assert (await api.get("/health"))[0] == 200
        assert (await api.post(COMPLETIONS, {"prompt": "x"}))[0] == 503
        api.ring.token(add.request_id, "cd")
        api.ring.finish(add.request_id)
        events = parse_events(await response.content.read())
        assert "".join(e["choices"][0]["text"] for e in events) == "abcd"


async def test_a_stop_before_the_ring_has_turned_cuts_no_stream(tmp_path: Path) -> None:
    async with running_api() as api:
        api.ring.script, api.ring.answers_first = idle, False  # the first token never comes
        api.load(write_model(tmp_path))
        await api.ring.until(lambda: len(api.ring.added) == 1)
        api.link.stop()
        assert api.serving is not None
        assert await asyncio.wait_for(api.serving, 10)  # True: all live streams have finished
        await api.ring.until(lambda: len(api.ring.aborted) == 1)


@pytest.mark.rule(76)
async def test_drain_timeout_gives_an_error_event(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(drain_timeout=0.1))
    async with loaded_api(tmp_path, config) as api:
        api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
        response = await api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": True})
        api.link.stop()
        events = parse_events(await response.content.read())
        assert events[-1]["error"]["code"] == 503


@pytest.mark.rule(75)
async def test_slow_reader_gets_merged_text_and_holds_nobody(api: Api) -> None:
    """While a client does not read, its pieces merge; what it then reads is whole."""
    api.ring.script = idle
    body = {"prompt": "x", "stream": True, "max_tokens": 40}
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
    add = await api.ring.next_added()
    for char in "abcdefgh":
        api.ring.token(add.request_id, char)
    api.ring.finish(add.request_id)
    await api.ring.until(lambda: add.request_id in api.ring.released)
    events = parse_events(await (await request).content.read())
    assert "".join(e["choices"][0]["text"] for e in events) == "abcdefgh"
    assert len(events) <= 9


@pytest.mark.rule(71)
async def test_keep_alive_comment_sends_headers_early(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(sse_keep_alive=0.05))
    async with loaded_api(tmp_path, config) as api:
        api.ring.script = idle
        body = {"prompt": "x", "stream": True}
        request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
        add = await api.ring.next_added()
        reader = EventReader(await asyncio.wait_for(request, 5))  # no token yet, but the request is accepted
        await reader.until_comment()
        api.ring.token(add.request_id, "a")
        api.ring.finish(add.request_id)
        assert (await reader.rest_json())[0]["choices"][0]["text"] == "a"


@pytest.mark.rule(65)
async def test_headers_wait_for_admission(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(sse_keep_alive=0.05))
    async with loaded_api(tmp_path, config) as api:
        api.ring.script = idle
        api.ring.auto_accept = False
        body = {"prompt": "x", "stream": True}
        request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
        add = await api.ring.next_added()
        await asyncio.sleep(0.6)  # many keep-alive intervals
        assert not request.done()
        api.ring.refuse(add.request_id, 503, "full")
        assert (await request).status == 503


async def test_deadline_answers_with_what_is_there(api: Api) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    status, body = await api.post(COMPLETIONS, {"prompt": "x", "timeout_s": 0.1})
    assert status == 200
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "abort", "timeout")
    assert body["usage"]["completion_tokens"] == 2
    await api.ring.until(lambda: api.ring.aborted)
    assert api.ring.aborted[0].cause == AbortCause.DEADLINE


async def test_queue_deadline_is_a_503(api: Api) -> None:
    api.ring.script = idle
    status, body = await api.post(COMPLETIONS, {"prompt": "x", "queue_timeout_s": 0.1, "stream": True})
    assert (status, body["error"]["error_code"]) == (503, "queue_timeout")
    await api.ring.until(lambda: api.ring.aborted)


async def test_waiting_clients_are_told_their_place_and_the_progress_of_their_prompt(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(sse_keep_alive=0.05))
    async with loaded_api(tmp_path, config) as api:
        api.ring.script = idle
        request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json={"prompt": "x" * 30, "stream": True}))
        add = await api.ring.next_added()
        reader = EventReader(await request)
        for accepted, words in (
            (Accepted(add.request_id, 3), "queued position=3 eta="),
            (Accepted(add.request_id, 0, 16), "prefill 16/30"),
        ):
            api.ring.send(accepted=[accepted])
            await reader.until_comment(words)
        api.ring.token(add.request_id, "a")
        api.ring.finish(add.request_id)
        assert (await reader.rest_json())[0]["choices"][0]["text"] == "a"
