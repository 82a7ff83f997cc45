"""Start, stop and death of the processes, seen from outside: exit codes, pids, logs, ports."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import StartServer
from tests.e2e.harness import Server, children_of, is_alive, wait_until

pytestmark = pytest.mark.slow

PARTS = ("api-0", "detok-0", "engine-0")


def test_ready_names_every_process_and_prints_a_working_curl(sim_server: Server) -> None:
    assert set(sim_server.pids) == set(PARTS)
    assert all(is_alive(pid) for pid in sim_server.pids.values())
    curl = next(line for line in sim_server.output.splitlines() if "curl -N" in line)
    body = json.loads(curl[curl.index("-d '") + 4 : curl.rindex("'")])
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    assert list(sim_server.stream(path, body))[-1] == "[DONE]"


def test_processes_have_names(sim_server: Server) -> None:
    for name, pid in sim_server.pids.items():
        title = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert title == f"nanoserve: {name}"


def test_each_process_has_a_log_and_a_watchdog_log(sim_server: Server) -> None:
    for name in PARTS:
        assert (sim_server.log_dir / f"{name}.log").exists()
        assert name in sim_server.log(name, "watchdog.log")
    assert "supervisor" in sim_server.log("supervisor", "watchdog.log")
    assert "started engine-0" in sim_server.log("supervisor")


@pytest.mark.rule(76)
def test_sigterm_ends_everything_with_code_0(start_server: StartServer) -> None:
    server = start_server("sim")
    assert server.stop() == 0
    assert not any(is_alive(pid) for pid in server.pids.values())
    assert "stopped" in server.output


@pytest.mark.case(44)
@pytest.mark.rule(1)
def test_used_port_is_one_line_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "nanoserve.launch_server", "sim", "--port", str(port)]
        done = subprocess.run(
            [*command, "--log-dir", str(tmp_path)], capture_output=True, text=True, timeout=30, check=False
        )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1 and str(port) in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-num-seq", "3"], ["--max-num-seq", "--max-num-seqs"]),
        (["--model", "no-such-model-anywhere"], ["no-such-model-anywhere"]),
        (
            ["--model", "sim", "--tokenizer", "smollm2-135m", "--block-size", "1", "--num-kv-blocks", "1"],
            ["first request", "KV cache"],
        ),
    ],
)
def test_wrong_input_is_one_line_and_code_1(args: list[str], words: list[str], start_server: StartServer) -> None:
    server = start_server(*args, wait=False)
    assert server.wait_exit(60) == 1
    errors = [line for line in server.output.splitlines() if line.startswith("nanoserve: ")]
    assert len(errors) == 1
    assert all(word in errors[0] for word in words)
    assert server.output.count(words[-1]) == 1  # not once by a child and once by the launcher
    assert "Traceback" not in server.output


@pytest.mark.rule(2)
def test_port_answers_while_the_ring_is_loading(start_server: StartServer) -> None:
    """/health is 200 and /ready is 503 with the stage until one token has gone round."""
    server = start_server("sim", wait=False)
    wait_until(lambda: _status(server, "/health") == 200, 20, "/health answers")
    status, body = server.get("/ready")
    if status != 200:  # the sim model may be quicker than we are
        assert status == 503 and body["stage"]
    server.wait_ready()
    assert server.get("/ready")[0] == 200


def _status(server: Server, path: str) -> int:
    try:
        return server.get(path, 5)[0]
    except OSError:
        return 0


@pytest.mark.rule(2)
def test_who_is_late_is_named_and_ends_the_start(start_server: StartServer) -> None:
    server = start_server("smollm2-135m", "--dtype", "float32", "--startup-timeout", "1", wait=False)
    children: set[int] = set()
    while server.returncode is None:
        children.update(children_of(server.pid))
        time.sleep(0.01)
    assert server.wait_exit() != 0 and children
    assert re.search(r"not ready after 1 s, still starting: .*engine-0 \(", server.output), server.output
    wait_until(lambda: not any(map(is_alive, children)), 5.0, "a child lives on")


@pytest.mark.case(43)
@pytest.mark.rule(3)
def test_sigkill_of_the_launcher_leaves_no_process(start_server: StartServer) -> None:
    server = start_server("sim")
    children = children_of(server.pid)
    assert len(children) == 3
    server.send_signal(signal.SIGKILL)
    server.wait_exit()
    wait_until(lambda: not any(is_alive(pid) for pid in children), 5, "all children are gone")


@pytest.mark.rule(3)
def test_a_stopped_child_dies_with_the_launcher_too(start_server: StartServer) -> None:
    """A process that runs no code at all (as in a long native call) must not outlive its parent."""
    server = start_server("sim")
    os.kill(server.pids["engine-0"], signal.SIGSTOP)
    server.send_signal(signal.SIGKILL)
    server.wait_exit()
    wait_until(lambda: not any(is_alive(pid) for pid in server.pids.values()), 5, "all children are gone")


@pytest.mark.rule(76)
def test_sigterm_lets_live_streams_finish(start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "20", "--drain-timeout", "20")
    events = server.stream("/v1/completions", {"model": "sim", "prompt": "one two three", "max_tokens": 60})
    first = next(events)
    server.send_signal(signal.SIGTERM)
    rest = list(events)
    assert rest[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in [first, *rest[:-1]]]
    assert choices[-1]["finish_reason"] == "length"
    assert not any("error" in json.loads(event) for event in rest[:-1])
    assert server.wait_exit() == 0


def test_a_stop_signal_to_every_process_is_still_a_drain(start_server: StartServer) -> None:
    """As systemd sends it: what the live streams need comes back for as long as they last."""
    server = start_server("sim", "--sim-step-ms", "20", "--drain-timeout", "30")
    events = server.stream("/v1/completions", {"model": "sim", "prompt": "one two three", "max_tokens": 60})
    first = next(events)
    for pid in (server.pids["engine-0"], server.pids["detok-0"], server.pids["api-0"], server.pid):
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.2)  # each has ended before the next one hears of it
    rest = list(events)
    assert rest[-1] == "[DONE]"
    choices = [json.loads(event)["choices"][0] for event in [first, *rest[:-1]]]
    assert choices[-1]["finish_reason"] == "length"
    assert server.wait_exit() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stop_while_it_starts_cuts_no_stream(number: signal.Signals, start_server: StartServer) -> None:
    server = start_server("sim", wait=False)
    server.wait_for_output("listening")
    time.sleep(0.2)  # the api has been started and cannot take a signal yet
    server.send_signal(number)
    assert server.wait_exit() == 0
    assert "Traceback" not in server.output


@pytest.mark.rule(76)
def test_drain_timeout_cuts_streams_with_an_error_event_and_code_75(start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "50", "--drain-timeout", "0.5")
    events = server.stream("/v1/completions", {"model": "sim", "prompt": "one two three", "max_tokens": 2000})
    next(events)
    server.send_signal(signal.SIGTERM)
    rest = list(events)
    assert rest[-1] == "[DONE]"
    assert "error" in json.loads(rest[-2])
    assert server.wait_exit() == 75


@pytest.mark.rule(76)
def test_second_signal_ends_at_once(start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "50", "--drain-timeout", "60")
    events = server.stream("/v1/completions", {"model": "sim", "prompt": "one two three", "max_tokens": 2000})
    next(events)
    server.send_signal(signal.SIGTERM)
    server.wait_for_output("stopping")
    begun = time.monotonic()
    server.send_signal(signal.SIGTERM)
    assert server.wait_exit(10) == 75
    assert time.monotonic() - begun < 10  # the drain alone would have taken sixty
    events.close()


def test_ctrl_c_is_the_same_as_sigterm(start_server: StartServer) -> None:
    server = start_server("sim")
    server.send_signal(signal.SIGINT)
    assert server.wait_exit() == 0
    assert "KeyboardInterrupt" not in server.output
