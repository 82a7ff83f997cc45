"""Several api processes of a real server: whichever the kernel gives a client to answers for all of them."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.e2e.harness import Server
from tests.sse_grammar import DONE, Event, SseParser

pytestmark = pytest.mark.slow


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str
) -> http.client.HTTPResponse:
    data = None if body is None else json.dumps(body)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, data, {"Content-Type": "application/json", **headers})
    return connection.getresponse()


def one_connection_each(server: Server) -> dict[str, http.client.HTTPConnection]:
    """A kept connection to every api process, by its name."""
    names = {pid: name for name, pid in server.pids.items() if name.startswith("api-")}
    found: dict[str, http.client.HTTPConnection] = {}
    for _ in range(500):
        connection = server.connect()
        name = names[json.loads(ask(connection, "GET", "/server_info").read())["pid"]]
        found.setdefault(name, connection)
        if found[name] is not connection:
            connection.close()
        if len(found) == len(names):
            return found
    raise AssertionError(f"only {sorted(found)} answer")


def text_of(events: list[Event]) -> str:
    return "".join(event.json["choices"][0]["text"] for event in events if event.data != DONE)


def test_the_processes_answer_as_one(start_server: StartServer) -> None:
    server = start_server("sim", "--api-workers", "2", "--resume-grace", "20", "--sim-step-ms", "20")
    here, there = (connection for _, connection in sorted(one_connection_each(server).items()))
    body = {"prompt": "a b c d e f", "max_tokens": 200, "stream": True, "ignore_eos": True, "request_id": "job"}
    stream = ask(there, "POST", "/v1/completions", body)
    parser, seen = SseParser(), list[Event]()
    while len(text_of(seen)) < 10 or seen[-1].id is None:
        seen += parser.feed(stream.readline())
    last_id = seen[-1].id
    text = ask(here, "GET", "/metrics").read().decode()
    for name, value in (("api-0", "1.0"), ("api-1", "2.0")):  # the warm-ups, and the stream
        assert f'nanoserve_requests_total{{api="{name}"}} {value}' in text
    info = json.loads(ask(here, "GET", "/server_info").read())
    assert info["api"]["live_requests"] == 1 and [entry["live_requests"] for entry in info["apis"]] == [0, 1]
    stream.close()
    there.close()
    # the stream goes on through the other process, and ends there when it is told to
    resumed = ask(here, "POST", "/v1/completions", body, Last_Event_ID=str(last_id))
    assert resumed.status == 200
    rest = list[Event]()
    while not rest:
        rest += parser.feed(resumed.readline())  # the same parser: its ids go on growing
    status, ended = server.post("/abort_request", {"rid": "job"})
    assert (status, ended) == (200, {"aborted": ["job"], "unknown": []})
    rest += parser.feed(resumed.read())
    parser.close()
    here.close()
    assert rest[0].id == f"{str(last_id).rpartition(':')[0]}:{int(str(last_id).rpartition(':')[2]) + 1}"
    assert [event.json["choices"][0]["finish_reason"] for event in rest if event.data != DONE][-1] == "abort"
    whole = text_of(seen + rest)
    assert ("a b c d e f" * 40).startswith(whole.strip()) or whole in "a b c d e f" * 40
