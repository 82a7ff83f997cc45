"""Dropped connections resume with Last-Event-ID: neither a gap nor a repeat, and no state is left."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientConnectionResetError, ClientError, web

from nanoserve.api.resume import EventLog, Resumes
from nanoserve.config import ApiConfig, ServerConfig
from nanoserve.errors import RequestError
from tests.integration.api_ring import Api, loaded_api
from tests.integration.event_reader import EventReader
from tests.sse_grammar import Event

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 50, "stream": True}


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    config = ServerConfig(api=ApiConfig(resume_grace=0.6))
    async with loaded_api(tmp_path, config) as running:
        yield running


def number_of(event: Event) -> int:
    assert event.id is not None
    return int(event.id.rpartition(":")[2])


async def start(api: Api, text: str) -> tuple[Any, int]:
    api.ring.script = lambda add: None
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=BODY))
    add = await api.ring.next_added()
    for char in text:
        api.ring.token(add.request_id, char)
    return await request, add.request_id


async def test_a_dropped_stream_goes_on_where_it_was(api: Api) -> None:
    response, request_id = await start(api, "abc")
    seen, reader = "", EventReader(response)
    while len(seen) < 2:
        last = await reader.next()
        seen += last.json["choices"][0]["text"]
    assert last.id is not None
    response.close()
    api.ring.token(request_id, "de")  # made while nobody listens
    await asyncio.sleep(0.1)
    assert not api.ring.aborted
    response = await api.http.post(api.url + COMPLETIONS, json=BODY, headers={"Last-Event-ID": last.id})
    api.ring.token(request_id, "f")
    api.ring.finish(request_id)
    events = await EventReader(response).rest()
    assert seen + "".join(event.json["choices"][0]["text"] for event in events[:-1]) == "abcdef"
    numbers = [number_of(event) for event in events]
    assert numbers == list(range(number_of(last) + 1, numbers[-1] + 1))
    # the whole of it can be had again within the grace time
    again = await api.http.get(api.url + "/v1/any", headers={"Last-Event-ID": last.id.rpartition(":")[0] + ":0"})
    assert (await EventReader(again).rest())[-1].id == events[-1].id


async def test_a_client_that_goes_in_the_middle_of_a_write_is_no_fault_of_the_server(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(response: web.StreamResponse, data: bytes) -> None:
        raise ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(web.StreamResponse, "write", gone)
    with pytest.raises((ClientError, TimeoutError)):
        async with asyncio.timeout(5):
            response, _ = await start(api, "abc")
            await response.read()
    api.ring.finish(api.ring.added[-1].request_id)  # or the server waits for the grace time before it ends
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_nobody_comes_back_so_the_request_ends(api: Api) -> None:
    response, request_id = await start(api, "abc")
    await EventReader(response).next()
    response.close()
    await api.ring.until(lambda: api.ring.aborted)
    assert api.ring.aborted[0].request_ids == [request_id]
    for _ in range(200):
        if not len(api.process.context.resumes or ()) and api.process.context.admission.num_held == 0:
            break
        await asyncio.sleep(0.01)
    assert len(api.process.context.resumes or ()) == 0 and api.process.context.admission.num_held == 0


async def test_refusals_are_still_a_status(api: Api) -> None:
    api.ring.auto_accept = False
    api.ring.script = lambda add: api.ring.refuse(add.request_id, 400, "This can never fit.")
    status, body = await api.post(COMPLETIONS, BODY)
    assert (status, body["error"]["message"]) == (400, "This can never fit.")
    assert api.process.context.admission.num_held == 0


@pytest.mark.parametrize("event_id", ["", "x", "x:1", "stream-1:abc"])
async def test_unknown_ids_are_a_404(api: Api, event_id: str) -> None:
    async with api.http.post(api.url + COMPLETIONS, json=BODY, headers={"Last-Event-ID": event_id}) as response:
        assert response.status == 404


def test_a_log_that_has_lost_the_place_says_so() -> None:
    log = EventLog("s", 100, lambda: 0.0)
    for number in range(20):
        log.send(b"data: %d\n\n" % number)
    assert log.since(19) == [b"id: s:20\ndata: 19\n\n"] and log.since(20) == []
    for number in (0, 21):
        with pytest.raises(RequestError) as caught:
            log.since(number)
        assert caught.value.status == 410


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [({"max_ended": 2}, ["3", "4"]), ({"max_ended_bytes": 100}, ["4"]), ({}, ["0", "1", "2", "3", "4"])],
)
async def test_ended_streams_are_bounded_and_the_first_to_end_are_forgotten(
    bounds: dict[str, int], kept: list[str]
) -> None:
    resumes = Resumes(grace_s=60.0, max_bytes=1000, clock_s=lambda: 0.0, **bounds)

    async def produce(log: EventLog) -> None:
        await log.begin(b"data: %b\n\n" % (b"x" * 50))

    for number in range(5):
        await resumes.start(str(number), produce)
        await asyncio.sleep(0.01)
    found = []
    for number in range(5):
        try:
            resumes.find(f"{number}:0")
            found.append(str(number))
        except RequestError as gone:
            assert gone.status == 404
    assert found == kept and resumes.num_forgotten == 5 - len(kept)
    resumes.close()
    assert len(resumes) == 0 and resumes._num_ended_bytes == 0


async def test_a_stream_that_somebody_follows_is_not_forgotten() -> None:
    resumes = Resumes(grace_s=60.0, max_bytes=1000, clock_s=lambda: 0.0, max_ended=1)
    may_end = asyncio.Event()

    async def produce(log: EventLog) -> None:
        await log.begin(b"data: x\n\n")
        await may_end.wait()

    first = await resumes.start("first", produce)
    follower = asyncio.create_task(first.take(1, 60.0))  # waits for the next event
    await asyncio.sleep(0.01)
    first._num_followers += 1  # and another, who has not read to the end yet
    may_end.set()
    await resumes.start("second", produce)
    await follower
    await asyncio.sleep(0.01)
    assert resumes.find("first:0")[0] is first and len(resumes) == 1
    resumes.close()
