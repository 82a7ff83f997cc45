"""Each process started by itself (`--role`), as a container runtime would: they find each other, die and come back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Server, wait_until
from tests.e2e.test_recovery import PROMPTS, after_events, is_ready, run_streams, running

pytestmark = pytest.mark.slow

Start = Callable[[str], Server]


@pytest.fixture
def start_role(tmp_path: Path) -> Iterator[Start]:
    running: list[Server] = []

    def start(role: str) -> Server:
        args = ("sim", "--sim-step-ms", "10", "--role", role, "--run-dir", str(tmp_path / "run"))
        running.append(Server(*args, log_dir=tmp_path / "logs"))
        return running[-1]

    yield start
    for server in running:
        server.stop()


def child_of(server: Server, name: str) -> int:
    lines = [line for line in server.output.splitlines() if line.startswith(f"{name}, pid ")]
    return int(lines[-1].split("pid ")[1].split(",")[0])


@pytest.mark.parametrize("order", [("api", "engine", "detok"), ("detok", "engine", "api")], ids="-".join)
def test_any_order_of_starts_gets_ready_and_any_process_may_come_back(
    order: tuple[str, ...], start_role: Start, tmp_path: Path
) -> None:
    servers = {role: start_role(role) for role in order}
    api = servers["api"].wait_ready()
    undisturbed = run_streams(api, max_tokens=60)

    def lose_detok_then_engine(progress: threading.Semaphore) -> None:
        after_events(progress, 60)
        for role in ("detok", "engine"):
            os.kill(child_of(servers[role], f"{role}-0"), signal.SIGKILL)
            assert servers[role].wait_exit() == 70
            servers[role] = start_role(role)  # what a restart policy does

    streams = run_streams(api, lose_detok_then_engine, max_tokens=60)
    assert [stream.errors for stream in streams] == [[]] * len(PROMPTS)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    wait_until(lambda: is_ready(api), 20, "ready again")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    for role, name in (("api", "supervisor"), ("engine", "engine-launcher"), ("detok", "detok-launcher")):
        servers[role].send_signal(signal.SIGUSR1)
        wait_until(lambda name=name: "launch_server.py" in api.log(name, "watchdog.log"), 5, f"stacks of {name}")
        assert servers[role].returncode is None


def test_a_stopped_engine_loses_nothing_and_a_restarted_api_serves_again(start_role: Start) -> None:
    servers = {role: start_role(role) for role in ("api", "engine", "detok")}
    api = servers["api"].wait_ready()
    undisturbed = run_streams(api, max_tokens=60)

    def stop_engine(progress: threading.Semaphore) -> None:
        after_events(progress, 60)
        assert servers["engine"].stop() == 0
        wait_until(lambda: not is_ready(api), 5, "the api says that it waits")
        servers["engine"] = start_role("engine")

    streams = run_streams(api, stop_engine, max_tokens=60)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert not any(stream.errors for stream in streams)

    assert api.stop() == 0
    again = start_role("api").wait_ready()  # meets the engine and the detokenizer that have been there all along
    assert [stream.text for stream in run_streams(again, max_tokens=60)] == [stream.text for stream in undisturbed]


def test_a_killed_api_leaves_nothing_in_the_engine_and_all_may_be_killed_at_once(start_role: Start) -> None:
    servers = {role: start_role(role) for role in ("api", "engine", "detok")}
    api = servers["api"].wait_ready()
    undisturbed = [stream.text for stream in run_streams(api, max_tokens=20)]
    body = {"model": "sim", "prompt": "x", "max_tokens": 20_000, "ignore_eos": True}
    events = api.stream("/v1/completions", body)
    next(events)
    api.send_signal(signal.SIGKILL)
    api.wait_exit()
    events.close()
    api = servers["api"] = start_role("api")
    api.wait_ready()
    wait_until(lambda: running(api) == 0, 5, "the dead one's request has left the engine")

    for server in servers.values():
        server.send_signal(signal.SIGKILL)
    for server in servers.values():
        server.wait_exit()
    api = [start_role(role) for role in ("engine", "api", "detok")][1].wait_ready()
    assert [stream.text for stream in run_streams(api, max_tokens=20)] == undisturbed


def test_a_second_process_of_a_role_is_refused_and_the_first_goes_on(start_role: Start) -> None:
    """Its sockets would take the place of the first one's, and every stream would wait for ever."""
    servers = {role: start_role(role) for role in ("api", "engine", "detok")}
    api = servers["api"].wait_ready()
    for role in servers:
        second = start_role(role)
        assert second.wait_exit() == 1
        assert f"another --role {role} is running there" in second.output
    status, _ = api.post("/v1/completions", {"model": "sim", "prompt": "hello", "max_tokens": 3}, 20)
    assert status == 200
