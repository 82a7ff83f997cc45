"""Twenty thousand mutated bodies against real processes: no 5xx, no leak, no process hurt, the neighbours' texts exact.

`NANOSERVE_FUZZ_BODIES` sets another number. A failure names the numbers of the bodies; `make_body` makes them again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.e2e.harness import Server, is_alive, wait_until
from tests.fuzz.mutations import MARK, Body, make_body
from tests.sse_grammar import SseParser, check_error, read_stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_BODIES = int(os.environ.get("NANOSERVE_FUZZ_BODIES", "20000"))
NUM_WARM = 2000  # caches and pools reach their size in these
NUM_CONNECTIONS = 8
NEIGHBOURS = {9805: " yes", 827: " two", 1194: " day", 8544: " ;"}
NEIGHBOUR_TOKENS = 100
MAX_GROWTH_BYTES = 12 << 20
HEADERS = {"Content-Type": "application/json"}
ZERO_AFTERWARDS = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_retained",
    "detok_states",
    "http_streams_open",
    "kv_blocks_used",
)
ZERO_ALWAYS = (  # not the engine's: a stop string whose request ends at the same moment is an abort too late
    "detok_dropped_messages_total",
    "detok_row_errors_total",
    "api_stream_gaps_total",
    "requests_resubmitted_total",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A short context, so that a body that lost its max_tokens ends soon; no prefix cache, so that idle means empty."""
    args = ("sim", "--max-model-len", "256", "--max-num-seqs", "64", "--no-prefix-cache")
    with Server(*args, log_dir=tmp_path_factory.mktemp("fuzz-logs")) as server:
        yield server.wait_ready()


class Fuzz:
    """Sends bodies and keeps what was wrong with the answers."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self._url = url
        self._http = http
        self._numbers: Iterator[int] = iter(())

    async def send(self, numbers: range) -> None:
        self._numbers = iter(numbers)
        await asyncio.gather(*(self._work() for _ in range(NUM_CONNECTIONS)))

    async def _work(self) -> None:
        for number in self._numbers:
            body = make_body(number)
            async with self._http.post(self._url + body.path, data=body.data, headers=HEADERS) as response:
                answer = await response.read()
            self.statuses[response.status] += 1
            try:
                check_answer(body, response.status, response.content_type, answer)
            except (AssertionError, ValueError, KeyError) as error:
                self.wrong.append(f"{number}: {body.data[:200]!r} -> {response.status} {answer[:300]!r}: {error}")


def check_answer(body: Body, status: int, kind: str, answer: bytes) -> None:
    """A right answer or a clear refusal, never a fault of ours, nothing about our insides."""
    assert status in (200, 400, 404), "only these are answers to a body"
    if status != 200:
        refusal = json.loads(answer)
        check_error(refusal)
        assert MARK.encode() not in answer, "it repeats the input"
        assert refusal["error"]["code"] == status and "engine" not in refusal["error"]["message"].lower()
    elif kind == "text/event-stream":
        parser = SseParser()
        events = parser.feed(answer)
        parser.close()
        assert not any('"error"' in event.data[:10] for event in events), "an error after the first byte"
    else:
        assert kind == "application/json" and json.loads(answer)["choices"]


async def stay_exact(url: str, http: aiohttp.ClientSession, token_id: int, text: str, until: asyncio.Event) -> int:
    """The sim model repeats its prompt, so this stream can only be `text`, over and over. Returns how many it read."""
    num_streams = 0
    while not until.is_set() or not num_streams:
        body = {"prompt": [token_id], "max_tokens": NEIGHBOUR_TOKENS, "temperature": 0, "stream": True}
        async with http.post(url + "/v1/completions", json=body) as response:
            checker = read_stream(await response.read(), chat=False)
        assert checker.choices[0].text == text * NEIGHBOUR_TOKENS and checker.choices[0].reason == "length"
        num_streams += 1
        await asyncio.sleep(0.02)
    return num_streams


def gauges(server: Server) -> dict[str, float]:
    lines = [line.split() for line in server.get("/metrics")[1].splitlines() if not line.startswith("#")]
    return {name.removeprefix("nanoserve_"): float(value) for name, value in lines if "{" not in name}


def is_idle(server: Server) -> bool:
    now = gauges(server)
    return all(now[name] == 0 for name in ZERO_AFTERWARDS)


def anonymous_bytes(pid: int) -> int:
    """What the process holds of its own; file pages do not count, swapped ones do."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return sum(int(status[key].split()[0]) for key in ("RssAnon", "VmSwap")) << 10


def footprint(server: Server) -> dict[str, tuple[int, int]]:
    return {name: (anonymous_bytes(pid), psutil.Process(pid).num_fds()) for name, pid in server.pids.items()}


async def run(server: Server, connections: list[Any]) -> tuple[Fuzz, dict[str, tuple[int, int]]]:
    trace = aiohttp.TraceConfig()

    async def opened(*_: Any) -> None:
        connections.append(None)

    trace.on_connection_create_end.append(opened)
    done = asyncio.Event()
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=NUM_CONNECTIONS), trace_configs=[trace]) as http,
        aiohttp.ClientSession() as neighbours_http,
    ):
        url = server.base_url
        neighbours = [
            asyncio.create_task(stay_exact(url, neighbours_http, token_id, text, done))
            for token_id, text in NEIGHBOURS.items()
        ]
        fuzz = Fuzz(url, http)
        try:
            await fuzz.send(range(NUM_WARM))
            before = await asyncio.to_thread(footprint, server)
            await fuzz.send(range(NUM_WARM, max(NUM_BODIES, 2 * NUM_WARM)))
        finally:
            done.set()
        assert all(await asyncio.gather(*neighbours))
    return fuzz, before


@pytest.mark.rule(14)
def test_bodies(server: Server) -> None:
    pids = dict(server.pids)
    connections: list[Any] = []
    fuzz, before = asyncio.run(run(server, connections))
    assert not fuzz.wrong, f"{len(fuzz.wrong)} of {fuzz.statuses}:\n" + "\n".join(fuzz.wrong[:8])
    # the bodies are of use: many are good, many are bad
    assert min(fuzz.statuses[200], fuzz.statuses[400]) > NUM_BODIES // 5
    # a refusal leaves the connection usable
    assert len(connections) <= NUM_CONNECTIONS, f"{len(connections)} connections were opened"
    wait_until(lambda: is_idle(server), 10.0, "something is left of the requests")
    counts = gauges(server)
    assert {name: counts[name] for name in ZERO_ALWAYS} == dict.fromkeys(ZERO_ALWAYS, 0.0)
    assert server.pids == pids and all(is_alive(pid) for pid in pids.values())
    for process in pids:
        assert "Traceback" not in server.log(process) and " ERROR " not in server.log(process)
    after = footprint(server)
    for name, (num_bytes, num_fds) in after.items():
        assert num_bytes - before[name][0] < MAX_GROWTH_BYTES, f"{name} grew: {before[name]} to {after[name]}"
        assert num_fds <= before[name][1] + 2, f"{name} has more descriptors: {before[name]} to {after[name]}"
