"""Broken frames are made good, broken rows, steps and requests fail alone; never is there wrong text."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.e2e.harness import Server, wait_until

pytestmark = pytest.mark.slow

PROMPT = "Grüße aus Zürich, 熊 \U0001f43b ကြိုဆို the quick brown fox"
TOKENS = 40


def complete(server: Server, prompt: str = PROMPT, tokens: int = TOKENS) -> tuple[str, list[Any]]:
    """The joined text of a stream, and the errors in it."""
    text, errors = "", []
    body = {"model": "sim", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    for data in server.stream("/v1/completions", body, timeout_s=30):
        if data == "[DONE]":
            return text, errors
        event = json.loads(data)
        if "error" in event:
            errors.append(event["error"])
        else:
            text += "".join(choice["text"] for choice in event["choices"])
    raise AssertionError("the stream ended without [DONE]")


# Messages 20 and 33 of an edge lie inside streams; the edge carries one message a step.
@pytest.mark.parametrize("action", ["drop", "dup", "delay", "corrupt"])
@pytest.mark.parametrize("edge", ["engine:{}=detok", "detok:{}=api"])
def test_a_bad_frame_in_the_middle_changes_no_text(
    edge: str, action: str, sim_server: Server, start_server: StartServer
) -> None:
    right = [complete(sim_server, f"{number} {PROMPT}") for number in range(4)]
    faults = [f"{edge.format(action)}@{turn}" for turn in (20, 33, 34)]
    server = start_server("sim", "--sim-step-ms", "5", "--fault", *faults)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda number: complete(server, f"{number} {PROMPT}"), range(4))) == right
    assert complete(server, f"0 {PROMPT}") == right[0] == (right[0][0], [])
    assert "nanoserve_requests_asked_again_total 0.0" in server.get("/metrics")[1]  # nobody waited until it was silent
    assert "restarting" not in server.output


# From api, message 1 turns the ring and 2 releases that; then each request is one AddRequest and one Release.
# To detok and api, the messages from 5 on are those of the first requests, their ends among them.
@pytest.mark.parametrize("action", ["drop", "dup", "delay", "corrupt"])
@pytest.mark.parametrize("edge", ["api:{}=engine", "engine:{}=detok", "detok:{}=api"])
def test_nothing_waits_for_ever_for_a_bad_frame(
    edge: str, action: str, sim_server: Server, start_server: StartServer
) -> None:
    """Also where it was a request, an end, or the release of one: what is silent is asked for again."""
    right, _ = complete(sim_server, tokens=1)
    faults = [f"{edge.format(action)}@{turn}" for turn in range(4, 10)]
    server = start_server("sim", "--fault", *faults)
    with ThreadPoolExecutor(4) as pool:
        for text, errors in pool.map(lambda _: complete(server, tokens=1), range(4)):
            assert (text, errors) == (right, [])
    assert complete(server, tokens=1) == (right, [])


@pytest.mark.parametrize(("action", "status"), [("nan", 500), ("fail-step", 500)])
def test_a_failed_row_or_step_ends_its_requests_alone(action: str, status: int, start_server: StartServer) -> None:
    server = start_server("sim", "--fault", f"engine:{action}@6")
    body = {"model": "sim", "prompt": PROMPT, "max_tokens": 20}
    answers = [server.post("/v1/completions", body) for _ in range(3)]
    assert [code for code, _ in answers].count(status) == 1
    assert [code for code, _ in answers].count(200) == 2
    assert "restarting" not in server.output


def test_a_poisoned_request_fails_alone(sim_server: Server, start_server: StartServer) -> None:
    """It crashes the engine each time it is in a step; its neighbours live through both restarts."""
    (token_id,) = sim_server.post("/tokenize", {"prompt": " poison", "add_special_tokens": False})[1]["tokens"]
    neighbours = [f"{number} {PROMPT}" for number in range(12)]
    right = {prompt: complete(sim_server, prompt, 200)[0] for prompt in neighbours}
    server = start_server("sim", "--sim-step-ms", "10", "--fault", f"engine:poison={token_id}@0!")
    with ThreadPoolExecutor(16) as pool:
        running = {prompt: pool.submit(complete, server, prompt, 200) for prompt in neighbours}
        wait_until(lambda: running_requests(server) == len(neighbours), 20, "all neighbours run")
        poisoned = pool.submit(server.post, "/v1/completions", {"model": "sim", "prompt": "a poison"})
        status, answer = poisoned.result(60)
        assert status == 500 and "crash" in answer["error"]["message"]
        for prompt, future in running.items():
            assert future.result(60) == (right[prompt], [])
    assert "engine-0" in server.output and "life 3" in server.output and "life 4" not in server.output


def running_requests(server: Server) -> float:
    lines = server.get("/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("nanoserve_num_requests_running"))


def test_a_full_disk_for_logs_stops_nothing(start_server: StartServer) -> None:
    faults = [f"{role}:disk-full@1" for role in ("api", "engine", "detok")]
    server = start_server("sim", "--fault", *faults, "--log-level", "debug")
    right, errors = complete(server)
    assert right and not errors
    assert "restarting" not in server.output
    assert server.stop() == 0


@pytest.mark.parametrize("role", ["api", "engine", "detok"])
def test_a_lost_word_to_the_launcher_delays_a_start_and_a_restart_and_no_more(
    role: str, start_server: StartServer
) -> None:
    """`Ready` is among the first ones; a process whose `Ready` never came would be waited for without end."""
    faults = [f"{role}:drop=supervisor@{turn}!" for turn in range(1, 6)]
    server = start_server("sim", "--startup-timeout", "20", "--fault", *faults)
    os.kill(server.pids[f"{role}-0"], signal.SIGKILL)
    server.wait_for_output(f"{role}-0 (pid", 10)
    server.wait_for_output("is back, life 2", 20)
    assert complete(server)[1] == []
