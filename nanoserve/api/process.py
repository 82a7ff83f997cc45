"""The api process: serves HTTP at once, loads tokenizer and template, joins the ring, drains at the end.

Owner process: api. The supervisor's child calls `run` with the listening socket it was given; several api processes may
share that socket. Everything runs on one event loop but tokenizing and rendering (`encoding`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import uvloop
import zmq

from nanoserve.api.app import build_app
from nanoserve.api.context import build_context
from nanoserve.api.edge import Edge
from nanoserve.api.engine_client import EngineClient
from nanoserve.api.metrics import Metrics
from nanoserve.api.model import ServedModel, load_served_model
from nanoserve.api.pacing import TICK_S
from nanoserve.api.peer_answers import answer
from nanoserve.api.peers import Peers
from nanoserve.api.probe import one_token_round
from nanoserve.api.validation import Checker
from nanoserve.config import ServerConfig
from nanoserve.errors import RequestError, StartupError
from nanoserve.ipc.channels import AsyncInbox, Outbox
from nanoserve.ipc.endpoints import Endpoints
from nanoserve.ipc.ids import RequestIdAllocator
from nanoserve.ipc.link import EXIT_STREAMS_CUT, ProcessLink
from nanoserve.ipc.messages import ApiCall, ApiInbox, ApiReply, Failure, ServerStatus, TextBatch
from nanoserve.obs.memory import count, read_ledger
from nanoserve.obs.proc import LoopLag, StopProbe

log = logging.getLogger(__name__)

_CLOSE_S = 2.0  # for handlers to write their last words


def run(config: ServerConfig, endpoints: Endpoints, link: ProcessLink, listen_socket: socket.socket) -> int:
    """Runs until a stop is requested and the live streams have ended, or the drain time is over.

    Returns the exit code: 0, or EXIT_STREAMS_CUT when live streams had to be ended.
    """
    supervisor = StopProbe(os.getppid())
    code: int = uvloop.run(_main(config, endpoints, link, listen_socket, supervisor))
    return code


async def _main(
    config: ServerConfig,
    endpoints: Endpoints,
    link: ProcessLink,
    listen_socket: socket.socket,
    supervisor: StopProbe,
) -> int:
    ring = zmq.Context()
    inbox: AsyncInbox[ApiInbox] = AsyncInbox(ring, endpoints.api(link.index), ApiInbox)
    outbox = Outbox(ring, endpoints.engine())
    others = [index for index in range(config.api.api_workers) if index != link.index]
    to_peers = {index: Outbox(ring, endpoints.api(index), linger_ms=0) for index in others}
    process = ApiProcess(config, link, inbox, outbox, to_peers)
    count("stream buffers", process.context.client.stream_bytes)
    process.context.log_dir = Path(config.obs.log_dir or endpoints.run_dir)
    process.context.lifecycle.is_supervisor_stopped = supervisor.is_stopped
    process.context.memory = lambda name: read_ledger(endpoints.memory_file(name))
    try:
        all_finished = await process.serve(listen_socket)
    finally:
        for channel in (outbox, *to_peers.values()):
            channel.close()
        inbox.close()
        ring.destroy(linger=1000)
    return 0 if all_finished else EXIT_STREAMS_CUT


class ApiProcess:
    """Wiring and the few tasks of this process."""

    def __init__(
        self,
        config: ServerConfig,
        link: ProcessLink,
        inbox: AsyncInbox[ApiInbox],
        outbox: Outbox,
        to_peers: Mapping[int, Outbox],
    ) -> None:
        self._config = config
        self._link = link
        self._inbox = inbox
        metrics = Metrics()
        ids = RequestIdAllocator(link.index, link.incarnation)
        client = EngineClient(ids, outbox.send, time.monotonic_ns, metrics)
        peers = Peers(link.index, {index: peer.send for index, peer in to_peers.items()}, time.monotonic_ns)
        self.context = build_context(config, client, metrics, peers)
        self._answer_call = partial(answer, self.context)
        self._stop = asyncio.Event()
        self._loading: asyncio.Task[None] | None = None
        self._can_load: asyncio.Future[ServerStatus] = asyncio.get_running_loop().create_future()
        self._failure: BaseException | None = None

    async def serve(self, listen_socket: socket.socket) -> bool:
        """Answers HTTP from the first moment; returns when drained, raises what ended one of its tasks.

        True when every live stream has finished by itself.
        """
        loop = asyncio.get_running_loop()
        edge = Edge(build_app(self.context), self._config.api)
        await edge.open(listen_socket)
        self._link.ready()
        loop.add_reader(self._link.stop_fd, self._request_stop)
        self._loading = loop.create_task(self._load())
        tasks = [self._loading, loop.create_task(self._tick())]
        for task in tasks:
            task.add_done_callback(self._note_failure)
        self._inbox.listen(self._on_messages)
        try:
            await self._stop.wait()
            all_finished = await self._drain()
        finally:
            loop.remove_reader(self._link.stop_fd)
            self.context.close()
            await edge.close()
            self._inbox.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure
        return all_finished

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        """A task that breaks ends the process loudly: the supervisor starts it again."""
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
            self._stop.set()

    def _request_stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._link.stop_fd)
        self.context.lifecycle.stopping = True
        self._stop.set()

    async def _drain(self) -> bool:
        """Lets live streams finish; at the limit (at once after a failure) they get an error event and [DONE].

        False when there were such streams.
        """
        client, pacer = self.context.client, self.context.pacer
        if self._loading is not None:
            self._loading.cancel()  # its first token is nobody's stream, and no fault when it does not come now
            await asyncio.wait([self._loading])
        if self._failure is None:
            await _until(lambda: not len(pacer) or self._failure is not None, self._config.api.drain_timeout)
        all_finished = not client.num_live
        if not all_finished:
            log.warning("%d requests did not end within the drain time", client.num_live)
            client.fail_all(Failure(503, "The server is shutting down.", None, "unavailable_error", "draining"))
        await _until(lambda: not len(pacer), _CLOSE_S)
        return all_finished

    def _on_messages(self, messages: Sequence[ApiInbox]) -> None:
        try:
            for message in messages:
                self._on_message(message)
            self.context.client.flush()
            self.context.pumps.run()
        except Exception as error:
            self._failure = self._failure or error
            self._stop.set()

    def _on_message(self, message: ApiInbox) -> None:
        context = self.context
        if isinstance(message, TextBatch):
            context.client.deliver(message)
            context.metrics.note_batch(message)
            if message.engine_stats is not None:
                context.admission.drain.note_ended(context.metrics.num_ended, context.clock_s())
        elif isinstance(message, ApiCall):
            context.peers.take_call(message, self._answer_call)
        elif isinstance(message, ApiReply):
            context.peers.take_reply(message)
        else:
            self._on_status(message)

    async def _tick(self) -> None:
        """The turning loop: feeds the watchdog and everything that waits for time."""
        lag = LoopLag(time.monotonic())
        self.context.metrics.watch_gauge(
            "api_loop_lag_seconds", "how late the event loop's last timer came", lambda: lag.last_s
        )
        while True:
            self._link.watchdog.feed()
            now_s = time.monotonic()
            self.context.tick(now_s)
            self.context.client.ask_for_silent(time.monotonic_ns())
            await asyncio.sleep(TICK_S)
            worst_s = lag.note(time.monotonic() - now_s - TICK_S, time.monotonic())
            if worst_s is not None:
                log.info("event loop late by at most %.0f ms in the last minute", worst_s * 1000)

    def _on_status(self, status: ServerStatus) -> None:
        context = self.context
        context.lifecycle.status = status
        context.peers.note_processes(status.processes)
        if status.failed:
            context.client.fail_all(Failure(503, "The server failed.", None, "unavailable_error", "failed"))
        for process in status.processes:
            if process.name == "engine-0":
                context.client.note_engine(process.incarnation)
        if status.model_dir and status.engine is not None and not self._can_load.done():
            self._can_load.set_result(status)

    async def _load(self) -> None:
        """When files and engine are there: tokenizer, template, and one real token round the ring."""
        status = await self._can_load
        assert status.engine is not None  # `_on_status` waits for it
        model = await asyncio.to_thread(load_served_model, self._config, Path(status.model_dir), status.engine)
        self.context.checker = Checker(self._config, model)
        self.context.lifecycle.loaded(model)
        await self._turn_ring(model)
        self.context.lifecycle.ring_turned = True
        self._link.ready(ring_turned=True)

    async def _turn_ring(self, model: ServedModel) -> None:
        """One token through engine and detokenizer; StartupError when the request fails."""
        ids = [0]
        if not self._config.model.skip_tokenizer_init:
            (ids,) = await self.context.lifecycle.require_encoder().encode(["Hello"], add_special_tokens=True)
        try:
            await one_token_round(self.context.client, ids[: max(model.max_model_len - 1, 1)] or [0])
        except RequestError as error:
            raise StartupError(f"the first request failed: {error.message}") from error


async def _until(condition: Callable[[], bool], limit_s: float) -> None:
    """Polls: the end of a process has no better event, and it happens once."""
    ends_s = time.monotonic() + limit_s
    while not condition() and time.monotonic() < ends_s:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
