"""Each loop is stuck on purpose: the stacks are written, health tells the truth, and the process comes back."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

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


@pytest.mark.rule(78)
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


@pytest.mark.rule(77)
@pytest.mark.parametrize("role", ["detok", "engine"])
def test_a_stuck_loop_is_seen_within_two_seconds(role: str, start_server: StartServer) -> None:
    """Counted from the last token that came round; long before the watchdog's limits, and nothing is lost."""
    watchdog = ("--watchdog-soft", "5", "--watchdog-hard", "6")
    server = start_server("sim", *watchdog, "--sim-step-ms", "20", "--fault", f"{role}:stick@100")
    came: list[float] = []
    events: list[str] = []

    def read() -> None:
        for event in server.stream("/v1/completions", {"model": "sim", "prompt": "a b c", "max_tokens": 400}):
            came.append(time.monotonic())
            events.append(event)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        wait_until(lambda: server.get("/health")[0] == 503, 30, "health is wrong")
        assert came and time.monotonic() - came[-1] < 2.5
        reading.result(60)
    assert events[-1] == "[DONE]" and not any('"error"' in event for event in events)


def test_native_code_that_holds_the_lock_is_dumped(start_server: StartServer) -> None:
    # A turn some seconds after the start: the timer that was set while the engine loaded allows for more than 8 s.
    server = start_server("sim", "--watchdog-soft", "1", "--watchdog-hard", "0", "--fault", "engine:hold=8@8")
    wait_until(lambda: "Timeout (0:00:0" in server.log("engine-0", "watchdog.log"), 30, "the C timer's stacks")
    assert "_happen" in server.log("engine-0", "watchdog.log")


@pytest.mark.case(42)
@pytest.mark.rule(4, 77)
@pytest.mark.parametrize("name", ["detok-0", "engine-0", "supervisor"])
def test_a_stopped_process_is_seen_and_nothing_is_lost(name: str, sim_server: Server) -> None:
    pid = sim_server.pids.get(name, sim_server.pid)
    events = sim_server.stream("/v1/completions", {"model": "sim", "prompt": "a b c", "max_tokens": 20})
    next(events)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: sim_server.get("/ready")[0] == 503, 2.2, "not ready within two seconds")
        assert name in str(sim_server.get("/ready")[1])
        assert sim_server.get("/health")[0] == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: is_ready(sim_server), 5, "ready again")
    assert list(events)[-1] == "[DONE]"


@pytest.mark.rule(78)
def test_a_declared_long_step_is_no_alarm(start_server: StartServer) -> None:
    server = start_server("sim", *WATCHDOG, "--sim-step-ms", "2500")
    status, _ = server.post("/v1/completions", {"model": "sim", "prompt": "hello", "max_tokens": 1})
    assert status == 200
    assert "no progress" not in server.log("engine-0", "watchdog.log")
    assert "restarting" not in server.output


@pytest.mark.rule(71, 77, 78)
def test_a_prompt_of_32k_tokens_is_no_alarm_and_health_stays_right(start_server: StartServer) -> None:
    """Computed in one step that takes longer than both limits: it was declared, and /health answers at once."""
    server = start_server(
        "sim", *WATCHDOG, "--sim-token-us", "150", "--max-num-batched-tokens", "32k", "--max-model-len", "40000"
    )
    body = {"model": "sim", "prompt": [7 + number % 500 for number in range(32_000)], "max_tokens": 2}
    slow, answers = [], 0
    with ThreadPoolExecutor(1) as pool:
        prefill = pool.submit(server.post, "/v1/completions", body)
        while not prefill.done():
            began = time.monotonic()
            assert server.get("/health")[0] == 200
            answers += 1
            if time.monotonic() - began > 0.05:
                slow.append(time.monotonic() - began)
            time.sleep(0.05)
    status, answer = prefill.result()
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 32_000)
    # A bad moment of the machine is not ours; a health check that waits for the step would be late each time.
    assert answers > 30 and len(slow) < answers / 4, slow
    assert "no progress" not in server.log("engine-0", "watchdog.log")
    assert "restarting" not in server.output


@pytest.mark.rule(77)
def test_health_is_fast_at_full_load_and_tells_of_a_stopped_api_worker(start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "5", "--api-workers", "2")
    body = {"model": "sim", "prompt": "a b c", "max_tokens": 300, "ignore_eos": True}
    with ThreadPoolExecutor(96) as pool:
        load = [pool.submit(list, server.stream("/v1/completions", body)) for _ in range(96)]
        times = []
        while not all(future.done() for future in load):
            began = time.monotonic()
            assert server.get("/health", 10)[0] == 200
            times.append(time.monotonic() - began)
            time.sleep(0.02)
        assert all(future.result()[-1] == "[DONE]" for future in load)
    assert len(times) > 10 and sorted(times)[len(times) // 2] < 0.05, times
    os.kill(server.pids["api-1"], signal.SIGSTOP)
    try:
        wait_until(lambda: server.get("/health", 10)[0] == 503, 2.2, "unhealthy within two seconds")
        assert server.get("/health")[1]["processes"] == ["api-1"]
    finally:
        os.kill(server.pids["api-1"], signal.SIGCONT)
    wait_until(lambda: server.get("/health", 10)[0] == 200, 5, "healthy again")


def test_sigusr1_writes_the_stacks_of_a_healthy_process(sim_server: Server) -> None:
    for name, pid in sim_server.pids.items():
        os.kill(pid, signal.SIGUSR1)
        wait_until(lambda name=name: "process.py" in sim_server.log(name, "watchdog.log"), 5, f"stacks of {name}")
        assert is_alive(pid)


def test_sigusr1_to_the_launcher_writes_its_stacks_and_no_stream_breaks(sim_server: Server) -> None:
    """It is the pid that the console shows first."""
    events = sim_server.stream("/v1/completions", {"model": "sim", "prompt": "a b c", "max_tokens": 300})
    seen = [next(events)]
    os.kill(sim_server.pid, signal.SIGUSR1)
    os.kill(sim_server.pid, signal.SIGUSR2)  # means nothing, to anybody
    for pid in sim_server.pids.values():
        os.kill(pid, signal.SIGUSR2)
        os.kill(pid, signal.SIGHUP)  # a child's terminal is the launcher's business
    wait_until(lambda: "supervisor.py" in sim_server.log("supervisor", "watchdog.log"), 5, "stacks of the launcher")
    seen += events
    assert seen[-1] == "[DONE]" and not any("error" in event for event in seen)
    assert all(is_alive(pid) for pid in (sim_server.pid, *sim_server.pids.values()))
