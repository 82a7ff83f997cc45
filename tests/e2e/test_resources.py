"""What a server costs when nothing happens, and what thousands of requests leave behind: nothing."""

from __future__ import annotations

import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import StartServer
from tests.e2e.harness import Server, wait_until

pytestmark = pytest.mark.slow


def processes(server: Server) -> dict[str, psutil.Process]:
    return {"supervisor": psutil.Process(server.pid)} | {name: psutil.Process(pid) for name, pid in server.pids.items()}


def cpu_seconds(server: Server) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes(server).values())


def test_an_idle_server_costs_under_one_percent_of_a_core(start_server: StartServer) -> None:
    server = start_server("sim")
    time.sleep(1.5)  # the start's last work
    before, begun = cpu_seconds(server), time.monotonic()
    time.sleep(8)
    share = (cpu_seconds(server) - before) / (time.monotonic() - begun)
    # CPU time is counted in hundredths of a second: six processes may each be one off.
    assert share < 0.01 + 0.0075, f"{share:.2%} of a core"


def test_an_idle_server_wakes_up_at_once(start_server: StartServer) -> None:
    """The first request after a pause takes hardly longer than the next ones."""
    server = start_server("sim")
    body = {"model": "sim", "prompt": "hello", "max_tokens": 1}
    warm = min(_seconds(server, body) for _ in range(20))
    cold = []
    for _ in range(5):
        time.sleep(1.2)
        cold.append(_seconds(server, body))
    assert min(cold) < warm + 0.005


def _seconds(server: Server, body: dict[str, object]) -> float:
    begun = time.monotonic()
    assert server.post("/v1/completions", body)[0] == 200
    return time.monotonic() - begun


def memory(server: Server) -> dict[str, int]:
    """Anonymous memory, in memory or swapped out, in KiB."""
    found = {}
    for name, process in processes(server).items():
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines if ":" in line)
        found[name] = int(fields["RssAnon"].split()[0]) + int(fields["VmSwap"].split()[0])
    return found


def hang_up_after(server: Server, number: int, reads: int) -> None:
    """A stream that is left after some bytes; 0 reads: before the first one."""
    connection: http.client.HTTPConnection = server.connect()
    body = {"model": "sim", "prompt": f"request {number} " * 20, "max_tokens": 400, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if reads:
        connection.getresponse().read(reads * 100)
    connection.close()


def load(server: Server, count: int) -> None:
    """A third each: finished streams, hang-ups in the middle, hang-ups before the first token."""

    def one(number: int) -> None:
        if number % 3 == 0:
            events = list(server.stream("/v1/completions", {"model": "sim", "prompt": f"r {number}", "max_tokens": 20}))
            assert events[-1] == "[DONE]"
        else:
            hang_up_after(server, number, number % 3 - 1)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(count)))


@pytest.mark.rule(81)
def test_memory_and_descriptors_are_flat_over_thousands_of_requests(start_server: StartServer) -> None:
    # Steps of no time at all would let the engine run far ahead of the others, and queues would be all we see.
    server = start_server("sim", "--sim-step-ms", "2")
    load(server, 600)  # allocators and caches reach their size
    wait_until(lambda: is_empty(server), 20, "everything is over")
    before, fds = memory(server), {name: p.num_fds() for name, p in processes(server).items()}
    load(server, 1800)
    wait_until(lambda: is_empty(server), 20, "everything is over")
    after = memory(server)
    growth = {name: after[name] - before[name] for name in after}
    # 2 KiB a request would be 3.6 MiB here.
    assert all(kib < 3 * 1024 for kib in growth.values()), growth
    wait_until(lambda: all(p.num_fds() <= fds[name] + 4 for name, p in processes(server).items()), 10, "fds are back")
    assert "restarting" not in server.output


def is_empty(server: Server) -> bool:
    values = {}
    for line in server.get("/metrics")[1].splitlines():
        if line and line[0] != "#":
            name = line.split("{")[0].split(" ")[0]
            values[name] = values.get(name, 0.0) + float(line.split()[-1])
    return not (values["nanoserve_num_requests_running"] or values["nanoserve_num_requests_waiting"])


def test_the_memory_ledger_adds_up_and_names_the_processes(smollm2_server: Server) -> None:
    """Bytes by owner sum to each process's resident memory; weights and KV are told apart."""
    smollm2_server.post("/v1/completions", {"model": "smollm2-135m", "prompt": "hello", "max_tokens": 4})
    wait_until(lambda: all(adds_up(entry) for entry in server_processes(smollm2_server)), 25, "the ledgers add up")
    entries = {entry["name"]: entry for entry in server_processes(smollm2_server)}
    assert {name: entry["pid"] for name, entry in entries.items()} == smollm2_server.pids
    assert all(entry["restarts"] == 0 and entry["uptime_s"] > 0 for entry in entries.values())
    engine = entries["engine-0"]["memory"]
    assert engine["weights"] > 100 << 20 and 0 < engine["kv cache"] < 600 << 20
    assert engine["heap"] > 0
    assert "detok states" in entries["detok-0"]["memory"] and "stream buffers" in entries["api-0"]["memory"]


def adds_up(entry: dict[str, Any]) -> bool:
    rss = psutil.Process(entry["pid"]).memory_info().rss
    told = sum(size for owner, size in entry["memory"].items() if owner != "rss")
    return abs(told - rss) < 0.1 * rss


def server_processes(server: Server) -> list[dict[str, Any]]:
    return list(server.get("/server_info")[1]["processes"])
