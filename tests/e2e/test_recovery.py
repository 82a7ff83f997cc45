"""Processes die in the middle of streams: every stream goes on, and its text is the undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartServer
from tests.e2e.harness import Server, children_of, is_alive, wait_until

pytestmark = pytest.mark.slow

PROMPTS = [f"Story {number}: the \U0001f43b and the 熊 met in Zürich, ကြိုဆို" for number in range(24)]


class Stream:
    """One streamed completion in a thread: what it said, and how many events have come so far."""

    def __init__(
        self, server: Server, prompt: str, max_tokens: int, progress: threading.Semaphore, model: str = "sim"
    ) -> None:
        self.text = ""
        self.errors: list[Any] = []
        self.finish_reason: str | None = None
        self.done = False
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        for data in server.stream("/v1/completions", body, timeout_s=120):
            progress.release()
            if data == "[DONE]":
                self.done = True
                continue
            event = json.loads(data)
            if "error" in event:
                self.errors.append(event["error"])
                continue
            for choice in event["choices"]:
                self.text += choice["text"]
                self.finish_reason = choice["finish_reason"] or self.finish_reason


def run_streams(server: Server, disturb: Any = None, max_tokens: int = 60, model: str = "sim") -> list[Stream]:
    """All prompts at once; `disturb(progress)` runs meanwhile and may wait for events."""
    progress = threading.Semaphore(0)
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        futures = [pool.submit(Stream, server, prompt, max_tokens, progress, model) for prompt in PROMPTS]
        if disturb is not None:
            disturb(progress)
        return [future.result(120) for future in futures]


def after_events(progress: threading.Semaphore, count: int) -> None:
    for _ in range(count):
        assert progress.acquire(timeout=30)


def newest_pid(server: Server, name: str) -> int:
    lines = [line for line in server.log("supervisor").splitlines() if f"started {name}, pid " in line]
    return int(lines[-1].split("pid ")[1].split(",")[0])


def is_ready(server: Server) -> bool:
    return bool(server.get("/ready", 10)[0] == 200)


@pytest.mark.case(42, 43)
@pytest.mark.rule(4)
@pytest.mark.parametrize("victims", [["detok-0"], ["engine-0"], ["detok-0", "engine-0"]], ids="+".join)
def test_no_stream_and_no_byte_is_lost(victims: list[str], start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "10", "--max-restarts", "100")
    undisturbed = run_streams(server)
    assert all(stream.done and not stream.errors for stream in undisturbed)

    for round_number in range(3):

        def disturb(progress: threading.Semaphore, wait: int = 40 + 200 * round_number) -> None:
            after_events(progress, wait)
            for name in victims:
                os.kill(newest_pid(server, name), signal.SIGKILL)

        streams = run_streams(server, disturb)
        assert [stream.errors for stream in streams] == [[]] * len(PROMPTS)
        assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
        assert all(stream.done and stream.finish_reason == "length" for stream in streams)
        wait_until(lambda: is_ready(server), 20, "ready again")
    for name in victims:
        assert f"started {name}, pid {newest_pid(server, name)}, incarnation 4" in server.log("supervisor")


@pytest.mark.rule(4)
def test_a_server_whose_directory_was_removed_goes_on_and_its_parts_can_still_return(start_server: StartServer) -> None:
    """Sockets, configuration, logs and all, as when somebody tidies up the directory for temporary files."""
    server = start_server("sim", "--sim-step-ms", "10")
    undisturbed = run_streams(server, max_tokens=500)  # that they still run when the parts have found each other again
    run_dir = server.run_dir

    def disturb(progress: threading.Semaphore) -> None:
        after_events(progress, 100)
        shutil.rmtree(run_dir)
        shutil.rmtree(server.log_dir)
        for name in ("detok-0", "engine-0"):
            after_events(progress, 100)
            os.kill(server.pids[name], signal.SIGKILL)

    streams = run_streams(server, disturb, max_tokens=500)
    assert [stream.errors for stream in streams] == [[]] * len(PROMPTS)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert "was removed" in server.output
    wait_until(lambda: is_ready(server), 20, "ready again")
    assert server.log("detok-0") and server.log("engine-0", "watchdog.log")
    assert server.stop() == 0 and not run_dir.exists()


@pytest.mark.parametrize("name", ["detok-0", "engine-0"])
def test_a_request_that_comes_while_a_part_is_down_waits_for_it(name: str, start_server: StartServer) -> None:
    server = start_server("sim")
    body = {"model": "sim", "prompt": "hello", "max_tokens": 5}
    right = server.post("/v1/completions", body)[1]["choices"]
    os.kill(server.pids[name], signal.SIGKILL)
    for _ in range(3):
        status, answer = server.post("/v1/completions", body, 30)
        assert (status, answer["choices"]) == (200, right)


@pytest.mark.case(42, 43)
@pytest.mark.rule(4)
@pytest.mark.timeout(300)
def test_a_real_model_goes_on_where_it_was(start_server: StartServer) -> None:
    """The same with weights: a new engine computes the prompt and the tokens so far again, and goes on as before."""
    server = start_server("smollm2-135m", "--max-model-len", "2048", "--kv-cache-memory", "256MiB", wait=False)
    server.wait_ready(240)
    undisturbed = run_streams(server, model="smollm2-135m", max_tokens=24)

    def disturb(progress: threading.Semaphore) -> None:
        after_events(progress, 150)
        for name in ("detok-0", "engine-0"):
            os.kill(newest_pid(server, name), signal.SIGKILL)

    streams = run_streams(server, disturb, model="smollm2-135m", max_tokens=24)
    assert [stream.errors for stream in streams] == [[]] * len(PROMPTS)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert "engine-0" in server.output and "is back, life 2" in server.output


@pytest.mark.rule(4)
def last_words(server: Server) -> str:
    """What the launcher shows of the dead process's log, indented, under its own last line."""
    _, _, shown = server.output.partition("nanoserve ends: ")
    return "\n".join(line for line in shown.splitlines()[1:] if line.startswith("  "))


def standby_of(server: Server) -> int | None:
    """The process that waits to be the engine; its own title names it."""
    for pid in children_of(server.pid):
        if b"engine-0, standby" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    return None


def test_a_standby_takes_the_engines_place(start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "10", "--standby-engine")
    undisturbed = run_streams(server)
    wait_until(lambda: standby_of(server), 20, "a standby")
    standby = standby_of(server)

    def disturb(progress: threading.Semaphore) -> None:
        after_events(progress, 200)
        kill("engine-0")(server)

    streams = run_streams(server, disturb)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert newest_pid(server, "engine-0") == standby
    wait_until(lambda: standby_of(server), 20, "another standby")
    os.kill(standby_of(server) or 0, signal.SIGKILL)
    streams = run_streams(server, disturb)  # one that could not live is missed, not needed
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    wait_until(lambda: standby_of(server), 20, "a third one")
    standby = standby_of(server)
    assert standby is not None and server.stop() == 0 and not is_alive(standby)


def test_too_many_deaths_end_everything_with_an_error_event_and_code_70(start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "20", "--max-restarts", "1")
    os.kill(newest_pid(server, "engine-0"), signal.SIGKILL)
    server.wait_for_output("engine-0", 10)
    wait_until(lambda: "is back, life 2" in server.output and is_ready(server), 20, "the one restart")

    def disturb(progress: threading.Semaphore) -> None:
        after_events(progress, 20 * len(PROMPTS))  # every stream is under way
        os.kill(newest_pid(server, "engine-0"), signal.SIGKILL)

    streams = run_streams(server, disturb, max_tokens=2000)
    assert all(stream.done and len(stream.errors) == 1 for stream in streams)
    assert server.wait_exit() == 70
    assert "nanoserve ends: engine-0" in server.output and "SIGKILL" in server.output
    assert not any(is_alive(pid) for pid in server.pids.values())


def test_a_process_that_dies_while_it_starts_ends_the_server_with_its_last_words(start_server: StartServer) -> None:
    server = start_server("sim", "--fault", "detok:raise@0", wait=False)
    assert server.wait_exit(60) == 70
    assert "RuntimeError: a fault on purpose" in last_words(server)
    assert "restarting" not in server.output


def test_a_process_that_cannot_live_ends_the_server(start_server: StartServer) -> None:
    server = start_server("sim", "--fault", "detok:raise@1!", "--max-restarts", "2", wait=False)
    assert server.wait_exit(60) == 70
    assert server.output.count("is back") == 2
    assert "RuntimeError: a fault on purpose" in last_words(server)


@pytest.mark.rule(4)
def test_an_api_process_takes_only_its_own_connections_with_it(start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "10", "--api-workers", "2", "--max-model-len", "32k")
    tokens = 800  # far longer than the test waits: what leaves the engine before they are over was ended, not finished
    undisturbed = run_streams(server, max_tokens=tokens)
    progress = threading.Semaphore(0)
    half = len(PROMPTS) // 2

    def start_on(name: str, other: str, prompts: list[str]) -> list[Future[Stream]]:
        """The other process is stopped meanwhile, so that it takes none of these connections."""
        os.kill(server.pids[other], signal.SIGSTOP)
        try:
            started = [pool.submit(Stream, server, prompt, tokens, progress) for prompt in prompts]
            wait_until(lambda: running_in(server, name) == len(prompts), 20, f"all of them on {name}")
        finally:
            os.kill(server.pids[other], signal.SIGCONT)
        return started

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        kept = start_on("api-0", "api-1", PROMPTS[:half])
        lost = start_on("api-1", "api-0", PROMPTS[half:])
        os.kill(server.pids["api-1"], signal.SIGKILL)
        server.wait_for_output("api-1 (pid")
        wait_until(lambda: running(server) == half, 5, "its requests left the engine")
        assert all(future.exception(60) is not None for future in lost)
        whole = [future.result(60) for future in kept]
    assert [stream.text for stream in whole] == [stream.text for stream in undisturbed[:half]]
    assert all(stream.done and not stream.errors for stream in whole)
    server.wait_for_output("is back, life 2")
    wait_until(lambda: running(server) == 0, 10, "nothing is left in the engine")


def running_in(server: Server, name: str) -> int:
    """Live requests of one api process; 0 when another one answers."""
    info = server.get("/server_info")[1]
    return int(info["api"]["live_requests"]) if info["pid"] == server.pids[name] else 0


def running(server: Server) -> int:
    lines = server.get("/metrics")[1].splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("nanoserve_num_requests_running")))


@pytest.mark.parametrize("name", ["detok-0", "engine-0", "api-0"])
def test_a_process_stopped_for_seconds_loses_nothing(name: str, start_server: StartServer) -> None:
    server = start_server("sim", "--sim-step-ms", "10")
    undisturbed = run_streams(server)

    def pause(progress: threading.Semaphore) -> None:
        after_events(progress, 100)
        os.kill(server.pids[name], signal.SIGSTOP)
        try:
            time.sleep(5)
        finally:
            os.kill(server.pids[name], signal.SIGCONT)

    streams = run_streams(server, pause)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert not any(stream.errors for stream in streams)
    wait_until(lambda: is_ready(server), 10, "ready again")
    assert "restarting" not in server.output


Deed = Callable[[Server], None]


def kill(*names: str) -> Deed:
    def deed(server: Server) -> None:
        for name in names:
            os.kill(newest_pid(server, name), signal.SIGKILL)

    return deed


def kill_again_at_birth(name: str) -> Deed:
    """The next life dies too, before it is ready."""

    def deed(server: Server) -> None:
        first = newest_pid(server, name)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: newest_pid(server, name) != first, 20, "a second life")
        os.kill(newest_pid(server, name), signal.SIGKILL)

    return deed


def kill_while_down(first: str, second: str) -> Deed:
    def deed(server: Server) -> None:
        pid = newest_pid(server, first)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: newest_pid(server, first) != pid, 20, "a second life")
        os.kill(newest_pid(server, second), signal.SIGKILL)

    return deed


def stop_then_kill(name: str) -> Deed:
    def deed(server: Server) -> None:
        pid = newest_pid(server, name)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1)
        os.kill(pid, signal.SIGKILL)

    return deed


def test_no_moment_is_a_bad_one_to_die(start_server: StartServer) -> None:
    """Twice in a row, while another part is down, stopped and then killed: in each way nothing is lost."""
    server = start_server("sim", "--sim-step-ms", "10", "--max-restarts", "100")
    undisturbed = run_streams(server)
    deeds = {
        "engine first": kill("engine-0", "detok-0"),
        "engine twice": kill_again_at_birth("engine-0"),
        "detok twice": kill_again_at_birth("detok-0"),
        "detok while the engine starts": kill_while_down("engine-0", "detok-0"),
        "engine while the detokenizer starts": kill_while_down("detok-0", "engine-0"),
        "a stopped engine": stop_then_kill("engine-0"),
        "a stopped detokenizer": stop_then_kill("detok-0"),
    }
    for what, deed in deeds.items():

        def disturb(progress: threading.Semaphore, deed: Deed = deed) -> None:
            after_events(progress, 200)
            deed(server)

        streams = run_streams(server, disturb)
        assert [stream.errors for stream in streams] == [[]] * len(PROMPTS), what
        assert [stream.text for stream in streams] == [stream.text for stream in undisturbed], what
        wait_until(lambda: is_ready(server), 20, f"ready again after {what}")


def test_a_new_detokenizer_whose_first_word_is_lost_hears_of_all_streams(start_server: StartServer) -> None:
    """Nobody answers its Resync; api asks for what has become silent."""
    server = start_server("sim", "--sim-step-ms", "10", "--fault", "detok:drop=engine@1!")
    undisturbed = run_streams(server)

    def disturb(progress: threading.Semaphore) -> None:
        after_events(progress, 200)
        kill("detok-0")(server)

    streams = run_streams(server, disturb)
    assert [stream.errors for stream in streams] == [[]] * len(PROMPTS)
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
