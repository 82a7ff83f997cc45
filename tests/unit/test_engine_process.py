"""The engine process with the sim model over real sockets, in a thread of this one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from nanoserve.config import ModelConfig, SchedulerConfig, ServerConfig, SimConfig
from nanoserve.engine import process
from nanoserve.ipc.channels import Inbox, Outbox
from nanoserve.ipc.columns import unpack_ids
from nanoserve.ipc.endpoints import Endpoints, create_run_dir, remove_run_dir
from nanoserve.ipc.messages import (
    AbortCause,
    AbortRequest,
    DetokInbox,
    EngineInbox,
    FinishReason,
    Release,
    RepetitionDetection,
    Resync,
    StartProfile,
    StopProfile,
    TokenBatch,
)
from nanoserve.sched.plan import StepPlan, StepResult
from tests.factories import make_add_request, make_request, make_scheduler, run_to_end
from tests.fakes import FakeExecutor, FakeLink, FakeWatchdog

CONFIG = ServerConfig(
    model=ModelConfig(model="sim", max_model_len=512), scheduler=SchedulerConfig(max_num_seqs=4), sim=SimConfig()
)


class Peers:
    """The api and the detokenizer of an engine under test."""

    def __init__(self, endpoints: Endpoints) -> None:
        self.context: zmq.Context = zmq.Context()
        self.detok: Inbox[TokenBatch] = Inbox(self.context, endpoints.detok(), DetokInbox)
        self.engine = Outbox(self.context, endpoints.engine())
        self.batches: list[TokenBatch] = []

    def send(self, *messages: EngineInbox) -> None:
        for message in messages:
            self.engine.send(message)

    def hear_until(self, done, timeout_s: float = 10.0) -> list[TokenBatch]:
        """Batches until `done(all batches)`."""
        end = time.monotonic() + timeout_s
        while not done(self.batches):
            assert time.monotonic() < end, f"not heard in {timeout_s} s; {len(self.batches)} batches so far"
            self.detok.wait(50)
            self.batches += self.detok.drain()
        return self.batches

    def output_of(self, request_id: int) -> list[int]:
        output: list[int] = []
        for batch in self.batches:
            ids, offset = unpack_ids(batch.token_ids), 0
            for other, count in zip(batch.request_ids, batch.num_tokens, strict=True):
                output += ids[offset : offset + count] if other == request_id else []
                offset += count
        return output

    def close(self) -> None:
        self.detok.close()
        self.engine.close()
        self.context.term()


class Running:
    """An engine in a thread."""

    def __init__(self, config: ServerConfig, model_dir: Path, endpoints: Endpoints) -> None:
        self.link = FakeLink()
        self.error: BaseException | None = None
        self._args = (config, model_dir, endpoints, self.link)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            process.run(*self._args)
        except BaseException as error:
            self.error = error

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.link.stop()
        self._thread.join(10)
        assert not self._thread.is_alive(), "the engine did not stop"
        self.link.close()
        assert self.error is None, self.error


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    config = {"model_type": "llama", "vocab_size": 100, "max_position_embeddings": 512, "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    made = create_run_dir()
    yield made
    remove_run_dir(made)


@pytest.fixture
def peers(endpoints: Endpoints) -> Iterator[Peers]:
    made = Peers(endpoints)
    yield made
    made.close()


@pytest.fixture
def engine(model_dir: Path, endpoints: Endpoints) -> Iterator[Running]:
    running = Running(CONFIG, model_dir, endpoints)
    yield running
    running.stop()


def finished_ids(batches: list[TokenBatch]) -> set[int]:
    return {end.request_id for batch in batches for end in batch.finished}


def test_messages_that_come_before_the_model_is_loaded_are_served(engine: Running, peers: Peers) -> None:
    peers.send(make_add_request(1, [7, 8, 9], max_tokens=5), make_add_request(2, [5], max_tokens=2))
    engine.start()
    batches = peers.hear_until(lambda heard: finished_ids(heard) == {1, 2})
    assert peers.output_of(1) == [7, 8, 9, 7, 8]
    assert peers.output_of(2) == [5, 5]
    first = next(batch for batch in batches if batch.accepted)
    assert first.request_ids == [], "admission waits for no token"
    assert engine.link.facts is not None
    assert engine.link.facts.vocab_size == 100
    assert engine.link.watchdog.declared[0] == "step 1: 2 rows, 4 tokens"


def test_eos_of_the_model_ends_a_request(engine: Running, peers: Peers) -> None:
    engine.start()
    peers.send(make_add_request(1, [7, 8, 1, 9], max_tokens=50, ignore_eos=False))
    batches = peers.hear_until(lambda heard: finished_ids(heard) == {1})
    (end,) = [end for batch in batches for end in batch.finished]
    assert (end.reason, end.stop_token_id, end.is_eos, end.num_output_tokens) == (FinishReason.STOP, 1, True, 3)
    assert 0 < end.scheduled_ns <= end.first_token_ns <= end.finished_ns


def test_an_idle_engine_waits_and_sends_heartbeats(
    engine: Running, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "HEARTBEAT_NS", 200_000_000)
    engine.start()
    batches = peers.hear_until(lambda heard: len(heard) >= 2)
    assert all(batch.request_ids == [] and batch.stats is not None for batch in batches)
    assert engine.link.watchdog.feeds <= len(batches) + 2, "an idle engine turns only to send its heartbeat"


def test_a_profile_is_written_beside_the_steps_it_is_of(
    model_dir: Path, endpoints: Endpoints, peers: Peers, tmp_path: Path
) -> None:
    engine, file = Running(CONFIG, model_dir, endpoints), tmp_path / "profile.json"
    peers.send(StartProfile(7, 4, str(file)), make_add_request(1, [7, 8, 9], max_tokens=8))
    engine.start()
    peers.hear_until(lambda heard: finished_ids(heard) == {1})
    assert peers.output_of(1) == [7, 8, 9, 7, 8, 9, 7, 8]
    engine.stop()
    events = json.loads(file.read_text())["traceEvents"]
    assert [e["args"]["rows"] for e in events if e["name"] == "step"] == [1] * 4


def test_a_profile_of_an_idle_engine_is_written_when_it_is_stopped(
    model_dir: Path, endpoints: Endpoints, peers: Peers, tmp_path: Path
) -> None:
    engine, file = Running(CONFIG, model_dir, endpoints), tmp_path / "profile.json"
    peers.send(StartProfile(7, 4, str(file)))
    engine.start()
    peers.hear_until(lambda heard: any(b.stats is not None and b.stats.profile_steps_left == 4 for b in heard))
    peers.send(StopProfile())
    peers.hear_until(lambda heard: heard[-1].stats is not None and not heard[-1].stats.profile_steps_left)
    engine.stop()
    assert len(json.loads(file.read_text())["traceEvents"]) == 1


def test_an_output_that_repeats_itself_ends_also_in_a_later_life(engine: Running, peers: Peers) -> None:
    wanted = {"repetition_detection": RepetitionDetection(3, 1, 2), "max_tokens": 50}
    peers.send(make_add_request(1, [7, 8, 9], **wanted), make_add_request(2, [7, 8, 9], output=[7, 8, 9, 7], **wanted))
    peers.send(make_add_request(3, [7, 8, 9], output=[7, 8, 9, 7, 8, 9], **wanted))
    engine.start()
    batches = peers.hear_until(lambda heard: finished_ids(heard) == {1, 2, 3})
    ends = {end.request_id: end for batch in batches for end in batch.finished}
    assert {end.reason for end in ends.values()} == {FinishReason.REPETITION}
    assert [ends[number].num_output_tokens for number in (1, 2, 3)] == [6, 6, 6]
    assert peers.output_of(1) == [7, 8, 9, 7, 8, 9] and peers.output_of(2) == [8, 9]


def test_abort_release_and_resync_over_the_wire(model_dir: Path, endpoints: Endpoints, peers: Peers) -> None:
    config = replace(CONFIG, sim=SimConfig(sim_step_ms=5))
    engine = Running(config, model_dir, endpoints)
    engine.start()
    peers.send(make_add_request(1, [7], max_tokens=400), make_add_request(2, [8], max_tokens=400))
    peers.hear_until(lambda heard: sum(bool(batch.request_ids) for batch in heard) >= 3)
    peers.send(AbortRequest([1], AbortCause.STOP_STRING, [2]), Resync([2]))
    batches = peers.hear_until(lambda heard: sum(opened.request_id == 2 for b in heard for opened in b.opened) == 2)
    (end,) = [end for batch in batches for end in batch.finished]
    assert (end.request_id, end.reason, end.num_output_tokens) == (1, FinishReason.STOP, 2)
    again = next(opened for batch in reversed(batches) for opened in batch.opened)
    assert len(unpack_ids(again.output_token_ids)) >= 3
    peers.send(Release([1]), AbortRequest([2], AbortCause.CLIENT_GONE), Release([2]))
    idle = peers.hear_until(lambda heard: heard[-1].stats is not None and heard[-1].stats.num_retained == 0)
    stats = idle[-1].stats
    assert stats is not None
    assert (stats.num_running, stats.blocks_used) == (0, 0)
    engine.stop()


def test_a_stop_tells_of_no_end_so_that_live_requests_go_on_in_the_next_life(
    model_dir: Path, endpoints: Endpoints, peers: Peers
) -> None:
    engine = Running(replace(CONFIG, sim=SimConfig(sim_step_ms=5)), model_dir, endpoints)
    engine.start()
    peers.send(make_add_request(1, [7], max_tokens=400))
    peers.hear_until(lambda heard: any(batch.request_ids for batch in heard))
    engine.stop()
    peers.detok.wait(200)
    assert not finished_ids([*peers.batches, *peers.detok.drain()])


def test_a_missing_model_ends_the_start(tmp_path: Path, endpoints: Endpoints) -> None:
    engine = Running(CONFIG, tmp_path / "nowhere", endpoints)
    engine.start()
    with pytest.raises(AssertionError, match="no model directory"):
        engine.stop()


class _Declared(FakeWatchdog):
    """A watchdog that remembers for how long each step was declared."""

    def __init__(self) -> None:
        self.limits: list[float] = []

    @contextmanager
    def busy(self, what: str, limit_s: float) -> Iterator[None]:
        self.limits.append(limit_s)
        yield


@pytest.mark.rule(78)
def test_a_stuck_decode_step_is_late_soon_and_a_long_prefill_never() -> None:
    declared, scheduler, now = _Declared(), make_scheduler(max_num_batched_tokens=256), [0.0]

    class Timed(FakeExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            now[0] += 0.03 * sum(row.num_tokens for row in plan.rows)
            return super().execute(plan)

    executor = process.WatchedExecutor(Timed(scheduler.limits.block_size), declared, lambda: now[0])
    for number in (0, 1):
        scheduler.add(make_request(number, range(2 + 32 * number, 34 + 32 * number), max_tokens=30), 1)
        run_to_end(scheduler, executor)
    prompts = [limit for limit in declared.limits if limit > 11]
    assert prompts == [process.STEP_LIMIT_S + 32 * process.TOKEN_LIMIT_S] * 2
    steps = [limit for limit in declared.limits if limit < 11]
    assert steps[: process.KNOWN_STEPS] == [process.STEP_LIMIT_S + process.TOKEN_LIMIT_S] * process.KNOWN_STEPS
    assert steps[process.KNOWN_STEPS :] == pytest.approx([4 * 0.03] * (len(steps) - process.KNOWN_STEPS))
