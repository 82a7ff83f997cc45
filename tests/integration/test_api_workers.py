"""Several api processes of one server: whichever is asked answers for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import aiohttp
import pytest

from nanoserve.api.peers import Peers
from nanoserve.config import ApiConfig, ServerConfig
from nanoserve.ipc.messages import ApiCall, ApiReply, ApiTask, ProcessFacts
from tests.integration.api_ring import Api, loaded_apis
from tests.integration.event_reader import EventReader

COMPLETIONS = "/v1/completions"


@pytest.fixture
async def apis(tmp_path: Path) -> AsyncIterator[list[Api]]:
    async with loaded_apis(tmp_path, 3, ServerConfig(api=ApiConfig(resume_grace=5.0))) as running:
        yield running


async def test_metrics_and_server_info_cover_every_process(apis: list[Api]) -> None:
    for number, api in enumerate(apis):
        for _ in range(number + 1):
            assert (await api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}))[0] == 200
    apis[0].ring.stats(num_running=3)
    for api in apis:
        while "nanoserve_num_requests_running 3.0" not in (text := (await api.get("/metrics"))[1]):
            await asyncio.sleep(0.01)
        for number in range(3):  # one more was the warm-up
            assert f'nanoserve_requests_total{{api="api-{number}"}} {number + 2}.0' in text
            assert f'nanoserve_time_to_first_token_seconds_count{{api="api-{number}"}} {number + 2}.0' in text
        assert text.count("# TYPE nanoserve_requests_total ") == 1
        info = (await api.get("/server_info"))[1]
        assert [entry["name"] for entry in info["apis"]] == ["api-0", "api-1", "api-2"]


async def test_a_request_is_aborted_wherever_it_lives(apis: list[Api]) -> None:
    ring = apis[0].ring
    ring.script = lambda add: ring.token(add.request_id, "ab")
    body = {"prompt": "x", "timeout_s": 60}
    waiting = [asyncio.create_task(api.post(COMPLETIONS, {**body, "rid": f"job-{api.link.index}"})) for api in apis]
    await ring.until(lambda: len(ring.added) == 6)
    assert (await apis[0].post("/abort_request", {"rid": "job-2"}))[1] == {"aborted": ["job-2"], "unknown": []}
    assert (await waiting[2])[1]["choices"][0]["finish_reason"] == "abort"
    assert (await apis[1].post("/abort_request", {"rid": "other"}))[1] == {"aborted": [], "unknown": ["other"]}
    assert not waiting[0].done() and not waiting[1].done()
    ended = (await apis[2].post("/abort_request", {"abort_all": True}))[1]["aborted"]
    assert {"job-0", "job-1"} <= set(ended)
    assert [(await task)[0] for task in waiting[:2]] == [200, 200]


async def test_an_answer_to_an_earlier_life_reaches_nobody_in_the_next() -> None:
    """It may hold the events of another client's stream, asked for shortly before the process died."""
    calls: list[ApiCall] = []
    clock = count(10**9)
    lives = [Peers(0, {1: calls.append}, lambda: next(clock)) for _ in range(2)]  # type: ignore[dict-item]
    asking = []
    for peers in lives:
        peers.note_processes([ProcessFacts("api-1", 1, 1, "ready", 1)])
        asking.append(asyncio.create_task(peers.ask(1, ApiTask.EVENTS, event_id="stream-1-a:0")))
        await asyncio.sleep(0)
    asking[0].cancel()
    lives[1].take_reply(ApiReply(1, calls[0].number, events=[b"another's"]))
    lives[1].take_reply(ApiReply(1, calls[1].number, events=[b"ours"]))
    reply = await asking[1]
    assert reply is not None and reply.events == [b"ours"]


async def test_a_change_of_the_log_reaches_every_process(apis: list[Api], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.api.peers.ANSWER_S", 0.3)
    body = {"log_requests": True, "log_requests_level": 1}
    assert (await apis[1].post("/configure_logging", body))[0] == 200
    logs = [api.process.context.request_log for api in apis]
    assert [(log.is_on, log.level) for log in logs] == [(True, 1)] * 3
    monkeypatch.setattr(apis[2].process.context.peers, "take_call", lambda call, answer: None)
    status, answer = await apis[0].post("/configure_logging", {"log_requests": False})
    assert status == 503 and "api-2" in answer["error"]["message"]
    assert [log.is_on for log in logs] == [False, False, True]


async def test_a_process_that_does_not_answer_is_named(apis: list[Api], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.api.peers.ANSWER_S", 0.3)
    monkeypatch.setattr(apis[1].process.context.peers, "take_call", lambda call, answer: None)
    status, body = await apis[0].post("/abort_request", {"rid": "job"})
    assert status == 503 and "api-1" in body["error"]["message"]
    assert 'requests_total{api="api-2"}' in (text := (await apis[0].get("/metrics"))[1])
    assert 'requests_total{api="api-1"}' not in text
    # one that is known to be dead is not waited for
    processes = [ProcessFacts(f"api-{i}", 1, 1, "dead" if i == 1 else "ready") for i in range(3)]
    apis[0].ring.status(stage="ready", processes=processes)
    while apis[0].process.context.peers.living != {2}:
        await asyncio.sleep(0.01)
    assert (await apis[0].post("/abort_request", {"rid": "job"}))[1] == {"aborted": [], "unknown": ["job"]}


STREAM = {"prompt": "x", "max_tokens": 50, "stream": True}


async def dropped_stream(api: Api) -> str:
    """A stream of this process whose client has read "abc" and is gone; the id of that event."""
    api.ring.script = lambda add: api.ring.token(add.request_id, "abc")
    response = await api.http.post(api.url + COMPLETIONS, json=STREAM)
    event = await EventReader(response).next()
    assert event.id is not None and event.json["choices"][0]["text"] == "abc"
    response.close()
    return event.id


async def test_a_dropped_stream_goes_on_at_another_process(apis: list[Api]) -> None:
    ring = apis[0].ring
    last_id, seen = await dropped_stream(apis[1]), "abc"
    request_id = ring.added[-1].request_id
    response = await apis[2].http.post(apis[2].url + COMPLETIONS, json=STREAM, headers={"Last-Event-ID": last_id})
    assert response.status == 200
    reader = EventReader(response)
    numbers = [int(last_id.rpartition(":")[2])]
    for text in ("d", "ef", ""):  # each waits at the other process until it is there
        if text:
            ring.token(request_id, text)
        else:
            ring.finish(request_id)
        event = await reader.next()
        assert event.id is not None
        seen += event.json["choices"][0]["text"]
        numbers.append(int(event.id.rpartition(":")[2]))
    assert seen == "abcdef" and [event.data for event in await reader.rest()] == ["[DONE]"]
    assert numbers == list(range(numbers[0], numbers[0] + 4))
    assert not ring.aborted
    for event_id, status in ((f"{last_id.rpartition(':')[0]}:999", 410), ("stream-1-x:1", 404), ("stream-7-x:1", 404)):
        got, answer = await apis[0].post(COMPLETIONS, STREAM, Last_Event_ID=event_id)
        assert (got, answer["error"]["code"]) == (status, status)


async def test_whoever_follows_a_stream_of_a_process_that_dies_hears_of_it_at_once(apis: list[Api]) -> None:
    """And not after the patience of ten seconds for the next event: the client can begin anew."""
    ring = apis[0].ring
    last_id = await dropped_stream(apis[1])
    response = await apis[0].http.get(apis[0].url + "/any", headers={"Last-Event-ID": last_id})
    assert response.status == 200
    reading = asyncio.create_task(response.read())
    while not apis[0].process.context.peers.num_waiting:
        await asyncio.sleep(0.01)
    for state, waits in (("stalled", True), ("dead", False)):
        processes = [ProcessFacts(f"api-{i}", 1, 1, state if i == 1 else "ready") for i in range(3)]
        apis[0].ring.status(stage="ready", processes=processes)
        while apis[0].process.context.peers.living != {2}:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert bool(apis[0].process.context.peers.num_waiting) == waits
    with pytest.raises(aiohttp.ClientPayloadError):  # cut, without the end of a whole answer
        await reading
    ring.finish(ring.added[-1].request_id)


async def test_a_key_cannot_read_the_stream_of_another_one_elsewhere(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(resume_grace=5.0, api_key=("one", "two")))
    async with loaded_apis(tmp_path, 2, config) as apis:
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        url, headers = apis[1].url + COMPLETIONS, {"X-Api-Key": "one"}
        last_id = (await EventReader(await apis[1].http.post(url, json=body, headers=headers)).next()).id or ""
        for key, status in (("two", 404), ("one", 200)):
            headers = {"X-Api-Key": key, "Last-Event-ID": last_id}
            async with apis[0].http.post(apis[0].url + COMPLETIONS, json=body, headers=headers) as response:
                assert response.status == status


async def test_nobody_comes_back_at_another_process_so_the_request_ends(tmp_path: Path) -> None:
    async with loaded_apis(tmp_path, 2, ServerConfig(api=ApiConfig(resume_grace=0.3))) as apis:
        ring = apis[0].ring
        last_id = await dropped_stream(apis[1])
        response = await apis[0].http.get(apis[0].url + "/any", headers={"Last-Event-ID": last_id})
        await asyncio.sleep(0.7)
        assert not ring.aborted  # a follower elsewhere is a follower
        response.close()
        ring.token(ring.added[-1].request_id, "d")  # the next piece finds nobody
        await ring.until(lambda: ring.aborted)
