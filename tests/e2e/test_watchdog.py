"""Each loop is stuck on purpose: the stacks are written, health tells the truth, and the process comes back."""

from __future__ import annotations

import os
import signal

import pytest

from tests.conftest import StartServer
from tests.e2e.harness import Server, is_alive, wait_until

pytestmark = pytest.mark.slow

WATCHDOG = ("--watchdog-soft", "1", "--watchdog-hard", "2")


def is_ready(server: Server) -> bool:
    try:
        return server.get("/ready", 5)[0] == 200
    except OSError:
        return False


def first_pid(server: Server, name: str) -> int:
    line = next(line for line in server.log("supervisor").splitlines() if f"started {name}, pid " in line)
    return int(line.split("pid ")[1].split(",")[0])


@pytest.mark.parametrize("role", ["api", "detok", "engine"])
def test_a_stuck_loop_is_dumped_then_ended_then_restarted(role: str, start_server: StartServer) -> None:
    # The api's loop turns several times a second, the others' at least once a second.
    turn = 20 if role == "api" else 3
    server = start_server("sim", *WATCHDOG, "--fault", f"{role}:stick@{turn}")
    # On a busy machine the loop may be stuck before the ring has turned: READY then names the second life.
    first = first_pid(server, f"{role}-0")
    wait_until(lambda: "stacks of all threads" in server.log(f"{role}-0", "watchdog.log"), 30, "the stacks")
    dump = server.log(f"{role}-0", "watchdog.log")
    assert "_happen" in dump  # the very frame that hangs
    assert f"{role}/process.py" in dump
    wait_until(lambda: not is_alive(first), 15, "the hard limit ends the process")
    server.wait_for_output(f"{role}-0 (pid {first}) ended with exit code 71, restarting")
    server.wait_for_output("is back, life 2")
    wait_until(lambda: is_ready(server), 15, "ready again")
    status, body = server.post("/v1/completions", {"model": "sim", "prompt": "hello", "max_tokens": 3})
    assert status == 200 and body["usage"]["completion_tokens"] == 3


def test_native_code_that_holds_the_lock_is_dumped(start_server: StartServer) -> None:
    server = start_server("sim", "--watchdog-soft", "1", "--watchdog-hard", "0", "--fault", "engine:hold=8@4")
    wait_until(lambda: "Timeout (0:00:0" in server.log("engine-0", "watchdog.log"), 30, "the C timer's stacks")
    assert "_happen" in server.log("engine-0", "watchdog.log")


def test_a_stopped_process_is_seen_and_nothing_is_lost(sim_server: Server) -> None:
    pid = sim_server.pids["detok-0"]
    events = sim_server.stream("/v1/completions", {"model": "sim", "prompt": "a b c", "max_tokens": 20})
    next(events)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: sim_server.get("/ready")[0] == 503, 2.2, "not ready within two seconds")
        assert "detok-0" in str(sim_server.get("/ready")[1])
        assert sim_server.get("/health")[0] == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: is_ready(sim_server), 5, "ready again")
    assert list(events)[-1] == "[DONE]"


def test_a_declared_long_step_is_no_alarm(start_server: StartServer) -> None:
    server = start_server("sim", *WATCHDOG, "--sim-step-ms", "2500")
    status, _ = server.post("/v1/completions", {"model": "sim", "prompt": "hello", "max_tokens": 1})
    assert status == 200
    assert "no progress" not in server.log("engine-0", "watchdog.log")
    assert "restarting" not in server.output


def test_sigusr1_writes_the_stacks_of_a_healthy_process(sim_server: Server) -> None:
    for name, pid in sim_server.pids.items():
        os.kill(pid, signal.SIGUSR1)
        wait_until(lambda name=name: "process.py" in sim_server.log(name, "watchdog.log"), 5, f"stacks of {name}")
        assert is_alive(pid)
