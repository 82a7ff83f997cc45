"""The detokenizer process alone, over its real sockets: how many tokens per second it sustains. For `bench detok`.

A child runs `detok.process.run`; this process plays engine and api with a few steps in flight, at batch 256, stop
strings on a tenth of the streams. CPU seconds are the child's own, from the first batch to the last.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import psutil
import zmq

from nanoserve.bench.detok_frames import STEPS, frames
from nanoserve.bench.stats import percentile
from nanoserve.config import ServerConfig
from nanoserve.detok import process
from nanoserve.ipc.channels import Inbox
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.endpoints import Endpoints, create_run_dir, remove_run_dir
from nanoserve.ipc.link import Watchdog
from nanoserve.ipc.messages import (
    AbortRequest,
    ApiInbox,
    EngineFacts,
    EngineInbox,
    Opened,
    TextBatch,
    TextSpec,
    TokenBatch,
)
from nanoserve.tokenizer import Tokenizer, load_tokenizer

IN_FLIGHT = 4
ROUND_TRIPS = 200
WAVES = 16  # each with requests of its own; a wave is a quarter of a second or less


class _Watchdog:
    def feed(self) -> None:
        pass

    def idle(self) -> AbstractContextManager[None]:
        return nullcontext()

    def busy(self, what: str, limit_s: float) -> AbstractContextManager[None]:
        return nullcontext()


class _Link:
    """Implements `ipc.link.ProcessLink` without a supervisor."""

    def __init__(self, pipe: Connection) -> None:
        self.name, self.index, self.incarnation = "detok-0", 0, 1
        self.watchdog: Watchdog = _Watchdog()
        self.stop_requested = False
        self.stop_fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._pipe = pipe

    def stage(self, stage: str, progress: float = 0.0, *, model_dir: str = "") -> None:
        pass

    def ready(self, engine: EngineFacts | None = None, *, ring_turned: bool = False) -> None:
        self._pipe.send("ready")
        threading.Thread(target=self._wait_for_stop, daemon=True).start()

    def _wait_for_stop(self) -> None:
        self._pipe.recv()
        self.stop_requested = True
        os.eventfd_write(self.stop_fd, 1)


def _child(config: ServerConfig, model_dir: Path, endpoints: Endpoints, pipe: Connection) -> None:
    process.run(config, model_dir, endpoints, _Link(pipe))


def measure_process(config: ServerConfig, model_dir: Path, streams_ids: list[list[int]]) -> dict[str, float]:
    """Tokens per second of the clock and of the child's CPU, the share of one core that it used, and the round trip."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    endpoints = create_run_dir()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    api: Inbox[TextBatch] = Inbox(context, endpoints.api(), ApiInbox)
    engine: Inbox[AbortRequest] = Inbox(context, endpoints.engine(), EngineInbox)
    sender = context.socket(zmq.PUSH)
    sender.connect(endpoints.detok())
    child = spawn.Process(target=_child, args=(config, model_dir, endpoints, theirs))
    child.start()
    try:
        ours.recv()
        sustained = _sustained(psutil.Process(child.pid), sender, api, streams_ids)
        return sustained | _round_trip(load_tokenizer(model_dir), sender, engine)
    finally:
        ours.send("stop")
        child.join(10)
        sender.close(linger=0)
        api.close()
        engine.close()
        context.term()
        remove_run_dir(endpoints)


def _sustained(
    child: psutil.Process, sender: zmq.Socket[bytes], api: Inbox[TextBatch], streams_ids: list[list[int]]
) -> dict[str, float]:
    waves = [frames(streams_ids, first_request=(1 << 40) + (wave << 16)) for wave in range(WAVES)]
    messages = [frame for wave in waves for frame in wave]
    before, started = child.cpu_times(), time.perf_counter()
    num_sent = num_back = 0
    while num_back < len(messages):
        while num_sent < len(messages) and num_sent - num_back < IN_FLIGHT:
            sender.send(messages[num_sent])
            num_sent += 1
        api.wait(1000)
        for batch in api.drain():
            num_back += batch.detok_stats.lag_steps if batch.detok_stats else 0
    took, after = time.perf_counter() - started, child.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    num_tokens = WAVES * STEPS * len(streams_ids)
    return {
        "process_tokens_per_second": round(num_tokens / took),
        "process_tokens_per_cpu_second": round(num_tokens / cpu) if cpu else 0,
        "process_cores": round(cpu / took, 2),
    }


def _round_trip(tokenizer: Tokenizer, sender: zmq.Socket[bytes], engine: Inbox[AbortRequest]) -> dict[str, float]:
    """From the step that completes a stop string to the word of it at the engine; nothing else is under way."""
    encoder = msgspec.msgpack.Encoder()
    ids = tokenizer.encode("an END", add_special_tokens=False)
    spec = encoder.encode(TextSpec(stop=("END",)))
    took: list[float] = []
    for turn in range(ROUND_TRIPS):
        request_id = (1 << 41) + turn
        row = TokenBatch(
            0,
            1,
            turn,
            opened=[Opened(request_id, spec)],
            request_ids=[request_id],
            first_index=[0],
            num_tokens=[len(ids)],
            token_ids=pack_ids(ids),
        )
        frame = encoder.encode(row)
        started = time.perf_counter()
        sender.send(frame)
        while not engine.drain():
            engine.wait(1000)
        took.append((time.perf_counter() - started) * 1e6)
        time.sleep(0.002)
    return {"stop_round_trip_us": round(percentile(took, 0.5)), "stop_round_trip_p99_us": round(percentile(took, 0.99))}
