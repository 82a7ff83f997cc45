"""The detokenizer's loop over real sockets: drains all that waits, stops when asked, asks again after a restart."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import zmq

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.detok import process
from nanoserve.ipc.channels import Inbox, Outbox
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.endpoints import Endpoints, create_run_dir, remove_run_dir
from nanoserve.ipc.messages import (
    ApiInbox,
    EngineFacts,
    EngineInbox,
    EngineStats,
    Opened,
    Resync,
    TextBatch,
    TokenBatch,
)
from tests.unit.detok_tokenizers import byte_level


class Watchdog:
    def __init__(self) -> None:
        self.turns = 0

    def feed(self) -> None:
        self.turns += 1

    def idle(self) -> AbstractContextManager[None]:
        return nullcontext()

    def busy(self, what: str, limit_s: float) -> AbstractContextManager[None]:
        return nullcontext()


class Link:
    def __init__(self, incarnation: int) -> None:
        self.name, self.index, self.incarnation = "detok-0", 0, incarnation
        self.watchdog = Watchdog()
        self.is_ready = threading.Event()
        self.stop_requested = False
        self.stop_fd = os.eventfd(0, os.EFD_NONBLOCK)

    def stage(self, stage: str, progress: float = 0.0, *, model_dir: str = "") -> None:
        pass

    def ready(self, engine: EngineFacts | None = None, *, ring_turned: bool = False) -> None:
        self.is_ready.set()

    def stop(self) -> None:
        self.stop_requested = True
        os.eventfd_write(self.stop_fd, 1)


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    made = create_run_dir()
    yield made
    remove_run_dir(made)


def wait_for(inbox: Inbox[TextBatch], num: int) -> list[TextBatch]:
    got: list[TextBatch] = []
    deadline = time.monotonic() + 20
    while len(got) < num and time.monotonic() < deadline:
        inbox.wait(100)
        got += inbox.drain()
    return got


@pytest.mark.parametrize("incarnation", [1, 2])
def test_the_loop_from_first_to_last_message(endpoints: Endpoints, tmp_path: Path, incarnation: int) -> None:
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    config = ServerConfig(model=ModelConfig(cache_dir=str(tmp_path / "cache")))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    api: Inbox[TextBatch] = Inbox(context, endpoints.api(), ApiInbox)
    engine: Inbox[Resync] = Inbox(context, endpoints.engine(), EngineInbox)
    outbox = Outbox(context, endpoints.detok())
    ids = byte_level().encode("The quick 🔥 fox", add_special_tokens=False)
    # All of it waits before the process exists: one drain, one message.
    outbox.send(TokenBatch(0, 1, 1, opened=[Opened(1, b"\x90")]))
    for at, token_id in enumerate(ids):
        outbox.send(
            TokenBatch(0, 1, 2 + at, request_ids=[1], first_index=[at], num_tokens=[1], token_ids=pack_ids([token_id]))
        )
    link = Link(incarnation)
    thread = threading.Thread(target=process.run, args=(config, tmp_path, endpoints, link))
    thread.start()
    try:
        assert link.is_ready.wait(20)
        batches = wait_for(api, 1)
        while sum(len(batch.deltas[0]) for batch in batches if batch.deltas) < len("The quick 🔥 fox"):
            batches += wait_for(api, 1)
        assert "".join(batch.deltas[0] for batch in batches if batch.deltas) == "The quick 🔥 fox"
        assert max(batch.detok_stats.lag_steps for batch in batches if batch.detok_stats) > 1
        outbox.send(TokenBatch(0, 1, 99, stats=EngineStats(steps=99)))
        (beat,) = wait_for(api, 1)
        assert beat.engine_stats == EngineStats(steps=99) and beat.incarnation == incarnation
        asked = engine.drain()
        assert asked == ([Resync(request_ids=[])] if incarnation > 1 else [])
    finally:
        link.stop()
        thread.join(20)
        for channel in (api, engine, outbox):
            channel.close()
        context.term()
        os.close(link.stop_fd)
    assert not thread.is_alive()
    assert list((tmp_path / "cache" / "token-tables").iterdir())
