"""The whole ring in one test process: real api, engine and detokenizer loops in threads, real sockets, real HTTP.

Only the forward pass is the sim model's, behind a gate: a test decides how many steps may run and can read how many ran
for each request. Used where a fact is about steps, which a stopwatch cannot show.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from nanoserve.api import engine_client
from nanoserve.api import process as api_process
from nanoserve.config import ServerConfig
from nanoserve.detok import process as detok_process
from nanoserve.detok.manager import DetokManager
from nanoserve.engine import process as engine_process
from nanoserve.engine.core import EngineCore
from nanoserve.hub.resolve import prepare
from nanoserve.ipc.channels import Outbox
from nanoserve.ipc.endpoints import create_run_dir, remove_run_dir
from nanoserve.ipc.messages import EngineFacts, ServerStatus
from nanoserve.runner import sim
from nanoserve.sched.plan import Executor, StepPlan, StepResult


class Gate:
    """How many steps may run. Open at first."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._permits: int | None = None  # None: no limit

    def close(self) -> None:
        with self._condition:
            self._permits = 0

    def let_through(self, steps: int) -> None:
        with self._condition:
            self._permits = (self._permits or 0) + steps
            self._condition.notify_all()

    def open(self) -> None:
        with self._condition:
            self._permits = None
            self._condition.notify_all()

    def enter(self) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._permits is None or self._permits > 0)
            if self._permits is not None:
                self._permits -= 1


class GatedExecutor:
    """The sim executor behind a gate; counts the rows and tokens of each request."""

    def __init__(self, inner: Executor, gate: Gate) -> None:
        self._inner = inner
        self._gate = gate
        self.rows: Counter[int] = Counter()
        self.tokens: Counter[int] = Counter()
        self.last_request_id = 0

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.rows:
            self._gate.enter()
        result = self._inner.execute(plan)
        for row, count in zip(plan.rows, result.num_tokens, strict=True):
            self.rows[row.request_id] += 1
            self.tokens[row.request_id] += count
            self.last_request_id = max(self.last_request_id, row.request_id)
        return result

    def close(self) -> None:
        self._gate.open()
        self._inner.close()


class NullWatchdog:
    def feed(self) -> None: ...

    def idle(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def busy(self, what: str, limit_s: float) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


class ThreadLink:
    """`ProcessLink` of a loop that runs in a thread."""

    def __init__(self, name: str) -> None:
        self.name, self.index, self.incarnation = name, 0, 1
        self.watchdog = NullWatchdog()
        self.is_ready = threading.Event()
        self.ring_turned = threading.Event()
        self.facts: EngineFacts | None = None
        self.stop_requested = False
        self.stop_fd, self._stop_writer = os.pipe()

    def stage(self, stage: str, progress: float = 0.0, *, model_dir: str = "") -> None: ...

    def ready(self, engine: EngineFacts | None = None, *, ring_turned: bool = False) -> None:
        self.facts = engine or self.facts
        self.is_ready.set()
        if ring_turned:
            self.ring_turned.set()

    def stop(self) -> None:
        self.stop_requested = True
        os.write(self._stop_writer, b"x")

    def close(self) -> None:
        os.close(self.stop_fd)
        os.close(self._stop_writer)


class Ring:
    """What a test sees of the running server."""

    def __init__(self, base_url: str, gate: Gate, executor: GatedExecutor, parts: dict[type, Any]) -> None:
        self.base_url = base_url
        self.gate = gate
        self.executor = executor
        self.core: EngineCore = parts[EngineCore]
        self.manager: DetokManager = parts[DetokManager]
        self.client: engine_client.EngineClient = parts[engine_client.EngineClient]

    def leftovers(self) -> dict[str, int]:
        """Everything that any of the three processes still knows of any request."""
        scheduler = self.core.scheduler
        return {
            "engine running": scheduler.num_running,
            "engine waiting": scheduler.num_waiting,
            "engine retained": self.core.ledger.num_retained,
            "engine live": len(scheduler.live_ids()),
            "kv blocks": scheduler.tables.pool.num_used,
            "executor": len(self.executor._inner._states),  # type: ignore[attr-defined]
            "detok states and what it remembers of ended ones": self.manager.num_tracked,
            "api live": self.client.num_live,
            "api ending": self.client.num_ending,
        }


def _record_instances(monkeypatch: pytest.MonkeyPatch, kinds: list[type]) -> dict[type, Any]:
    made: dict[type, Any] = {}
    for kind in kinds:
        original = kind.__init__

        def init(self: Any, *args: Any, _kind: type = kind, _original: Any = original, **kwargs: Any) -> None:
            _original(self, *args, **kwargs)
            made[_kind] = self

        monkeypatch.setattr(kind, "__init__", init)
    return made


@contextlib.contextmanager
def running_ring(config: ServerConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ring]:
    """Starts the three loops, plays the supervisor's part in the handshake, and stops them in reverse order."""
    gate = Gate()
    executors: list[GatedExecutor] = []
    create = sim.create_sim_executor

    def create_gated(config: ServerConfig, vocab_size: int) -> tuple[Executor, EngineFacts]:
        inner, facts = create(config, vocab_size)
        executors.append(GatedExecutor(inner, gate))
        return executors[-1], facts

    monkeypatch.setattr(sim, "create_sim_executor", create_gated)
    parts = _record_instances(monkeypatch, [EngineCore, DetokManager, engine_client.EngineClient])
    model_dir = prepare(config, lambda stage, progress: None)
    endpoints = create_run_dir()
    listener = socket.create_server(("127.0.0.1", 0))
    links = {name: ThreadLink(f"{name}-0") for name in ("api", "engine", "detok")}
    failures: list[BaseException] = []

    def start(name: str, body: Callable[[], object]) -> threading.Thread:
        def guarded() -> None:
            try:
                body()
            except BaseException as error:  # a dead loop must fail the test, not hang it
                failures.append(error)
                links[name].is_ready.set()
                links[name].ring_turned.set()

        thread = threading.Thread(target=guarded, name=name)
        thread.start()
        return thread

    threads = {
        "api": start("api", lambda: api_process.run(config, endpoints, links["api"], listener)),
        "engine": start("engine", lambda: engine_process.run(config, model_dir, endpoints, links["engine"])),
        "detok": start("detok", lambda: detok_process.run(config, model_dir, endpoints, links["detok"])),
    }
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    to_api = Outbox(context, endpoints.api())
    try:
        for link in links.values():
            assert link.is_ready.wait(30), f"{link.name} did not become ready"
        to_api.send(ServerStatus(stage="warming up", model_dir=str(model_dir), engine=links["engine"].facts))
        assert links["api"].ring_turned.wait(30), "the ring did not turn"
        assert not failures, failures
        port = listener.getsockname()[1]
        yield Ring(f"http://127.0.0.1:{port}", gate, executors[0], parts)
    finally:
        gate.open()
        for name in ("api", "detok", "engine"):
            links[name].stop()
            threads[name].join(30)
            links[name].close()
        to_api.close()
        context.term()
        remove_run_dir(endpoints)
        listener.close()
    assert not failures, failures


def wait_until(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Polls; for facts that another thread makes true soon."""
    ends = time.monotonic() + limit_s
    while time.monotonic() < ends:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
