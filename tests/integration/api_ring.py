"""A real api process in the test's event loop, and a peer that plays engine and detokenizer over real ZMQ."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq

from nanoserve.api import process
from nanoserve.api.process import ApiProcess
from nanoserve.config import ServerConfig
from nanoserve.ipc.channels import AsyncInbox, Outbox
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.endpoints import Endpoints, create_run_dir, remove_run_dir
from nanoserve.ipc.ids import api_index
from nanoserve.ipc.messages import (
    AbortRequest,
    Accepted,
    AddRequest,
    ApiInbox,
    EngineFacts,
    EngineInbox,
    EngineStats,
    Failure,
    Finished,
    FinishReason,
    FlushCache,
    Pause,
    ProcessFacts,
    Release,
    Resync,
    RowTokenTexts,
    ServerStatus,
    StartProfile,
    StopProfile,
    TextBatch,
    TextFinished,
    TextSpec,
    TokenText,
)
from tests.fakes import FakeLink
from tests.sse_grammar import DONE, SseParser

EOS = 256
BOS = 257
VOCAB = 258
CONTEXT = 64
_PATIENCE_S = 30.0
_TICK_S = 0.02  # how often deadlines and grace times are looked at: a test of one waits for the next look
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_model(directory: Path, *, template: str | None = TEMPLATE, generation: dict[str, Any] | None = None) -> Path:
    """A model directory whose tokenizer has one token per byte, an EOS and a BOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocab = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>", "<bos>"])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"model_type": "llama", "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "eos_token_id": EOS}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "generation_config.json").write_text(json.dumps(generation or {}))
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(names))
    return directory


def _byte_of(char: str) -> int:
    from tokenizers import decoders

    text = decoders.ByteLevel().decode([char])
    return ord(char) if text == "�" or len(text) != 1 else ord(text)


class ApiLink(FakeLink):
    def __init__(self, index: int = 0) -> None:
        super().__init__(f"api-{index}", index)
        self.ready_calls: list[bool] = []

    def ready(self, engine: EngineFacts | None = None, *, ring_turned: bool = False) -> None:
        super().ready(engine, ring_turned=ring_turned)
        self.ready_calls.append(ring_turned)


class FakeRing:
    """Engine and detokenizer in one: takes what the api sends, answers as the test says.

    `script` is called with every AddRequest but the first of each api, which is the warm-up. Texts are made of one
    ASCII character per token, so character and token positions are equal.
    """

    def __init__(self, endpoints: Endpoints, context: zmq.Context, num_apis: int = 1) -> None:
        self._inbox: AsyncInbox[EngineInbox] = AsyncInbox(context, endpoints.engine(), EngineInbox)
        self._outboxes = [Outbox(context, endpoints.api(index)) for index in range(num_apis)]
        self._warm: set[int] = set()  # apis whose first request has come
        self.engine_incarnation = 1
        self.script: Callable[[AddRequest], None] = self.finish_at_once
        self.retell: Callable[[int], None] = lambda request_id: None  # the answer to a Resync
        self.added: list[AddRequest] = []
        self.aborted: list[AbortRequest] = []
        self.released: list[int] = []
        self.flushes = 0
        self.profiles: list[StartProfile] = []
        self.start_profile = lambda message: self.stats(profile=message.number, profile_steps_left=message.num_steps)
        self.figures = EngineStats()
        self.paused = False
        self.auto_accept = True
        self.answers_first = True  # the warm-up; else `script` gets it too
        self.changed = asyncio.Condition()
        self.sent: dict[int, int] = {}  # tokens sent per request

    async def run(self) -> None:
        came = asyncio.Event()

        def take(messages: Sequence[EngineInbox]) -> None:
            for message in messages:
                self._take(message)
            came.set()

        self._inbox.listen(take)
        while True:
            await came.wait()
            came.clear()
            async with self.changed:
                self.changed.notify_all()

    def _take(self, message: Any) -> None:
        if isinstance(message, AddRequest):
            self.added.append(message)
            self.sent.setdefault(message.request_id, 0)
            if self.auto_accept:
                self.send(to=api_index(message.request_id), accepted=[Accepted(message.request_id)])
            is_first = api_index(message.request_id) not in self._warm
            self._warm.add(api_index(message.request_id))
            if is_first and self.answers_first:
                self.token(message.request_id, "w")
                self.finish(message.request_id)
            else:
                self.script(message)
        elif isinstance(message, AbortRequest):
            self.aborted.append(message)
        elif isinstance(message, Resync):
            for request_id in message.request_ids:
                self.retell(request_id)
        elif isinstance(message, FlushCache):
            self.flushes += 1
            self.stats(num_flushes=self.flushes, flushed_blocks=7 * self.flushes)
        elif isinstance(message, Pause):
            self.paused = message.paused
            self.stats(paused=message.paused)
        elif isinstance(message, StartProfile):
            self.profiles.append(message)
            self.start_profile(message)
        elif isinstance(message, StopProfile):
            self.stats(profile_steps_left=0)
        elif isinstance(message, Release):
            self.released += message.request_ids

    async def until(self, condition: Callable[[], object]) -> None:
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(lambda: bool(condition())), 10)

    async def next_added(self) -> AddRequest:
        """The newest request after the warm-up."""
        await self.until(lambda: len(self.added) > 1)
        return self.added[-1]

    def send(self, *, to: int | None = None, **columns: Any) -> None:
        """To the api `to`, or to all of them."""
        batch = TextBatch(
            detok_index=0, incarnation=1, engine_index=0, engine_incarnation=self.engine_incarnation, step=0, **columns
        )
        for outbox in self._outboxes if to is None else self._outboxes[to : to + 1]:
            outbox.send(batch)

    def status(self, **fields: Any) -> None:
        for outbox in self._outboxes:
            outbox.send(ServerStatus(**fields))

    def token(self, request_id: int, text: str, *, at: int | None = None, logprobs: Any = None) -> None:
        """One token per character of `text`, from position `at` (default: where the request stands)."""
        first = self.sent[request_id] if at is None else at
        self.sent[request_id] = max(self.sent[request_id], first + len(text))
        self.send(
            to=api_index(request_id),
            request_ids=[request_id],
            deltas=[text],
            char_offset=[first],
            first_index=[first],
            num_tokens=[len(text)],
            token_ids=pack_ids(ord(char) for char in text),
            logprobs=[RowTokenTexts(0, logprobs, first)] if logprobs else [],
        )

    def finish(self, request_id: int, reason: FinishReason = FinishReason.LENGTH, **fields: Any) -> None:
        stop_string = fields.pop("stop_string", None)
        record = Finished(request_id=request_id, reason=reason, num_output_tokens=self.sent[request_id], **fields)
        self.send(to=api_index(request_id), finished=[TextFinished(record, stop_string)])
        self.stats(num_ended=self.figures.num_ended + 1)

    def refuse(self, request_id: int, status: int, message: str, **fields: Any) -> None:
        failure = Failure(status=status, message=message, **fields)
        record = Finished(request_id=request_id, reason=FinishReason.ERROR, failure=failure)
        self.send(to=api_index(request_id), finished=[TextFinished(record)])

    def finish_at_once(self, add: AddRequest) -> None:
        """`max_tokens` times the letter a."""
        self.token(add.request_id, "a" * add.sampling.max_tokens)
        self.finish(add.request_id)

    def stats(self, **fields: Any) -> None:
        """New figures of the engine; what is not given stays."""
        self.figures = msgspec.structs.replace(self.figures, **fields)
        self.send(engine_stats=self.figures)

    def close(self) -> None:
        self._inbox.close()
        for outbox in self._outboxes:
            outbox.close()


def token_text(char: str, logprob: float | None, offset: int, top: Any = ()) -> TokenText:
    return TokenText(ord(char), char, char.encode(), logprob, 1, list(top), offset)


def text_spec_of(add: AddRequest) -> TextSpec:
    return msgspec.msgpack.decode(add.text_spec, type=TextSpec)


def prompt_of(add: AddRequest) -> list[int]:
    return unpack_ids(add.prompt_token_ids)


def idle(_: AddRequest) -> None:
    """A script that leaves the request to the test."""


class Api:
    """A running api process with its peer and a client."""

    def __init__(
        self, ring: FakeRing, process: ApiProcess, link: ApiLink, http: aiohttp.ClientSession, url: str
    ) -> None:
        self.ring = ring
        self.process = process
        self.link = link
        self.http = http
        self.url = url
        self.serving: asyncio.Task[bool] | None = None

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Status and decoded JSON; `body` may be bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with self.http.post(self.url + path, data=io.BytesIO(data), headers=headers) as response:
            return response.status, json.loads(await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            text = await response.text()
            return response.status, json.loads(text) if response.content_type == "application/json" else text

    async def events(self, path: str, body: Any) -> list[Any]:
        """All events of a stream, checked by the strict parser."""
        async with self.http.post(self.url + path, json={**body, "stream": True}) as response:
            assert response.status == 200, await response.text()
            return parse_events(await response.read())

    def load(self, model_dir: Path, **status: Any) -> None:
        """What the supervisor tells when the engine is ready."""
        facts = EngineFacts(max_model_len=CONTEXT, vocab_size=VOCAB, num_blocks=100, block_size=16)
        self.ring.status(stage="ready", model_dir=str(model_dir), engine=facts, **status)

    async def until_ready(self) -> None:
        """It takes 20 ms of a core, and seconds of waiting for one where others keep all of them busy."""
        began, cpu = time.monotonic(), time.process_time()
        while time.monotonic() - began < _PATIENCE_S:
            status, answer = await self.get("/ready")
            if status == 200:
                return
            await asyncio.sleep(0.01)
        computed = time.process_time() - cpu
        raise AssertionError(
            f"not ready after {_PATIENCE_S:g} s, of which {computed:.1f} s were computing: {answer}, "
            f"{len(self.ring.added)} requests in the ring, {len(self.ring.released)} released"
        )


def parse_events(data: bytes) -> list[Any]:
    """All events of a whole stream but the terminator, through the strict parser."""
    parser = SseParser()
    events = [event.json for event in parser.feed(data) if event.data != DONE]
    parser.close()
    return events


@asynccontextmanager
async def running_api(config: ServerConfig | None = None, *, link: ApiLink | None = None) -> AsyncIterator[Api]:
    """An api process that serves but has not been told of a model yet."""
    async with _running(config or ServerConfig(), [link or ApiLink()]) as apis:
        yield apis[0]


@asynccontextmanager
async def _running(config: ServerConfig, links: list[ApiLink]) -> AsyncIterator[list[Api]]:
    """One api process per link; each has a port of its own, so that a test can choose whom it asks."""
    async with AsyncExitStack() as last:
        endpoints = create_run_dir()
        last.callback(remove_run_dir, endpoints)
        context = zmq.Context()
        last.callback(context.destroy, linger=0)
        last.enter_context(pytest.MonkeyPatch.context()).setattr(process, "TICK_S", _TICK_S)
        # Bound before anybody connects: ZMQ tries again only 0.1 to 0.2 s after a connection that nobody took.
        inboxes = [AsyncInbox[ApiInbox](context, endpoints.api(link.index), ApiInbox) for link in links]
        ring = FakeRing(endpoints, context, len(links))
        last.callback(ring.close)
        tasks = [asyncio.create_task(ring.run())]
        last.push_async_callback(_cancel, tasks)
        http = await last.enter_async_context(aiohttp.ClientSession())
        apis = [
            _start_api(config, link, inbox, links, endpoints, context, last, ring, http)
            for link, inbox in zip(links, inboxes, strict=True)
        ]
        tasks += [api.serving for api in apis if api.serving is not None]
        yield apis
        await http.close()
        for link in links:
            if not link.stop_requested:
                link.stop()
        await asyncio.wait_for(asyncio.gather(*tasks[1:]), 10)


def _start_api(
    config: ServerConfig,
    link: ApiLink,
    inbox: AsyncInbox[ApiInbox],
    links: list[ApiLink],
    endpoints: Endpoints,
    context: zmq.Context,
    last: AsyncExitStack,
    ring: FakeRing,
    http: aiohttp.ClientSession,
) -> Api:
    outbox = Outbox(context, endpoints.engine())
    to_peers = {peer.index: Outbox(context, endpoints.api(peer.index)) for peer in links if peer is not link}
    for part in (link, inbox, outbox, *to_peers.values()):
        last.callback(part.close)
    listen = socket.socket()
    listen.bind(("127.0.0.1", 0))
    listen.listen(128)
    process = ApiProcess(config, link, inbox, outbox, to_peers)
    api = Api(ring, process, link, http, f"http://127.0.0.1:{listen.getsockname()[1]}")
    api.serving = asyncio.create_task(process.serve(listen))
    return api


async def _cancel(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def loaded_apis(directory: Path, num_apis: int, config: ServerConfig | None = None) -> AsyncIterator[list[Api]]:
    """Several api processes of one server, all ready, which know of each other."""
    write_model(directory)
    async with _running(_named(config or ServerConfig()), [ApiLink(index) for index in range(num_apis)]) as apis:
        processes = [ProcessFacts(api.link.name, 1000 + api.link.index, 1, "ready") for api in apis]
        apis[0].load(directory, processes=processes)
        for api in apis:
            await api.until_ready()
        yield apis


@asynccontextmanager
async def loaded_api(directory: Path, config: ServerConfig | None = None, **model: Any) -> AsyncIterator[Api]:
    """An api process that is ready."""
    write_model(directory, **model)
    async with running_api(_named(config or ServerConfig())) as api:
        api.load(directory)
        await api.until_ready()
        yield api


def _named(config: ServerConfig) -> ServerConfig:
    return replace(config, model=replace(config.model, served_model_name=("tiny", "alias")))
