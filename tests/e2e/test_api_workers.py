"""Several api processes of a real server: whichever the kernel gives a client to answers for all of them."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.e2e.harness import Server

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


def test_the_processes_answer_as_one(start_server: StartServer) -> None:
    server = start_server("sim", "--api-workers", "2", "--resume-grace", "20", "--sim-step-ms", "20")
    here, there = (connection for _, connection in sorted(one_connection_each(server).items()))
    body = {"prompt": "a b c d e f", "max_tokens": 200, "stream": True, "ignore_eos": True, "request_id": "job"}
    stream = ask(there, "POST", "/v1/completions", body)
    last_id, seen = "", ""
    while len(seen) < 10:
        line = stream.readline().decode().strip()
        if line.startswith("id: "):
            last_id = line[4:]
        elif line.startswith("data: "):
            seen += json.loads(line[6:])["choices"][0]["text"]
    text = ask(here, "GET", "/metrics").read().decode()
    for name, value in (("api-0", "1.0"), ("api-1", "2.0")):  # the warm-ups, and the stream
        assert f'nanoserve_requests_total{{api="{name}"}} {value}' in text
    info = json.loads(ask(here, "GET", "/server_info").read())
    assert info["api"]["live_requests"] == 1 and [entry["live_requests"] for entry in info["apis"]] == [0, 1]
    stream.readline()  # the empty line behind what was read
    stream.close()
    there.close()
    # the stream goes on through the other process, and ends there when it is told to
    resumed = ask(here, "POST", "/v1/completions", body, Last_Event_ID=last_id)
    assert resumed.status == 200
    first = resumed.readline().decode()
    assert first.startswith("id: ") and int(first.rpartition(":")[2]) == int(last_id.rpartition(":")[2]) + 1
    status, ended = server.post("/abort_request", {"rid": "job"})
    assert (status, ended) == (200, {"aborted": ["job"], "unknown": []})
    rest = resumed.read().decode()
    here.close()
    texts = [json.loads(line[6:])["choices"][0] for line in rest.splitlines() if line.startswith("data: {")]
    assert texts[-1]["finish_reason"] == "abort" and rest.endswith("data: [DONE]\n\n")
    whole = seen + "".join(choice["text"] for choice in texts)
    assert ("a b c d e f" * 40).startswith(whole.strip()) or whole in "a b c d e f" * 40
