"""From submitted requests to the bytes of one HTTP answer, unary or streamed; the same for every endpoint.

Owner process: api. The first update is awaited before the status line, so what can be refused gets a real 4xx or 5xx.
However a response ends (done, error, client gone, deadline), `respond` ends its requests in the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

from aiohttp import web

from nanoserve.api import sse
from nanoserve.api.access import given_key
from nanoserve.api.context import ApiContext
from nanoserve.api.engine_client import ABORTED_WORD, NewRequest
from nanoserve.api.errors import Unavailable, from_failure
from nanoserve.api.event_writer import EventWriter
from nanoserve.api.http import request_label
from nanoserve.api.remote_resume import follow_elsewhere, home_of, new_stream_id
from nanoserve.api.results import Choice, ResponseFormat
from nanoserve.api.resume import LAST_EVENT_ID, EventLog, Resumes
from nanoserve.api.stream import Outlet, Piece, RequestStream, TextSink
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import AbortCause, FinishReason

JSON = "application/json"
_NOTHING_NEW = "keep-alive"
_SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks of the ring."""

    requests: Sequence[NewRequest]
    stream: bool
    timeout_s: float | None = None
    queue_timeout_s: float | None = None
    label: str = ""  # the client's own name for it, for /abort_request
    headers: dict[str, str] = field(default_factory=dict)


async def respond(request: web.Request, context: ApiContext, job: Job, form: ResponseFormat) -> web.StreamResponse:
    """Runs the job and answers. RequestError before the first byte becomes the status line (`app` writes it);
    ConnectionResetError when the client has gone.
    """
    if job.stream and context.resumes is not None:
        return await _respond_resumable(request, context, context.resumes, job, form)
    async with _exchange(request, context, job, form) as exchange:
        if not job.stream:
            return await exchange.unary()
        writer = EventWriter(request, {**_SSE_HEADERS, **job.headers}, context.clock_s)
        await exchange.stream(writer)
        return writer.response


async def _respond_resumable(
    request: web.Request, context: ApiContext, resumes: Resumes, job: Job, form: ResponseFormat
) -> web.StreamResponse:
    """The answer is made by a task of its own; this connection is the first to follow it."""

    async def produce(log: EventLog) -> None:
        async with _exchange(request, context, job, form) as exchange:
            await exchange.stream(log)

    stream = await resumes.start(new_stream_id(context.peers), produce, owner=given_key(request.headers))
    return await stream.follow(request, 0, {**_SSE_HEADERS, **job.headers})


async def resume(request: web.Request, context: ApiContext, resumes: Resumes) -> web.StreamResponse:
    """Goes on with a dropped stream after the client's `Last-Event-ID`, here or at the process that makes it."""
    event_id, owner = request.headers[LAST_EVENT_ID], given_key(request.headers)
    home = home_of(event_id)
    if home is not None and home in context.peers.living:
        return await follow_elsewhere(request, context.peers, home, event_id, owner, _SSE_HEADERS)
    stream, number = resumes.find(event_id, owner)
    return await stream.follow(request, number, _SSE_HEADERS)


@asynccontextmanager
async def _exchange(
    request: web.Request, context: ApiContext, job: Job, form: ResponseFormat
) -> AsyncIterator[Exchange]:
    """Admits the job and sends its requests; however it ends, those that still live end in the engine too."""
    num_requests = len(job.requests)
    share_key = _share_key(request, context)
    context.admission.admit(num_requests, context.clock_s(), share_key)
    requests: Sequence[NewRequest] = job.requests
    if share_key:
        requests = [replace(new, share_key=share_key, num_siblings=num_requests) for new in requests]
    outlet = Outlet(context.pumps)
    streams: list[RequestStream] = []
    exchange = Exchange(context, job, form, outlet, streams, label=request_label(request))
    context.pacer.add(exchange)
    try:
        streams.extend(context.client.submit(new, outlet) for new in requests)
        yield exchange
    finally:
        context.pacer.remove(exchange)
        context.client.abort(streams, AbortCause.CLIENT_GONE)  # only those that still live: the client has gone
        context.admission.leave(num_requests, share_key)
        context.request_log.note(exchange.label, job.label, request.path, streams, exchange.seconds)


class Writer(Protocol):
    """Where the events of a stream go: a client's connection, or a log that clients follow."""

    last_write_s: float
    blocked_since_s: float

    async def begin(self, data: bytes) -> None: ...

    def send(self, data: bytes) -> bool: ...

    def open_texts(self, around: sse.Around, on_stop: Callable[[Exception | None], None]) -> TextSink | None: ...

    async def drained(self) -> None: ...

    async def finish(self) -> None: ...

    def cut(self) -> None: ...


class Exchange:
    """One HTTP request while it is answered."""

    def __init__(
        self,
        context: ApiContext,
        job: Job,
        form: ResponseFormat,
        outlet: Outlet,
        streams: list[RequestStream],
        *,
        label: str,
    ) -> None:
        self._context = context
        self._job = job
        self._form = form
        self._outlet = outlet
        self._streams = streams
        self._num_ended = 0
        self.label = label
        self.labels = {job.label, label} - {""}
        self._began_s = context.clock_s()
        self._silent_since_s = 0.0  # a comment is due
        self._last_words = ""
        self._queue_expired = False
        self._writer: Writer | None = None  # of a stream that has begun
        self._signal: asyncio.Future[None] | None = None  # ends the wait of `stream`: all is said, or nobody reads
        self._is_over = False

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._context.clock_s() - self._began_s

    async def unary(self) -> web.Response:
        choices = {stream.request_id: Choice(stream) for stream in self._streams}
        while self._num_ended < len(self._streams):
            for stream in await self._outlet.wait():
                piece = self._take(stream)
                self._raise_failure(piece)
                choices[stream.request_id].add(piece)
            self._raise_if_queue_expired()
        body = self._form.body(sorted(choices.values(), key=lambda choice: choice.index))
        return web.Response(body=body, content_type=JSON, headers=self._job.headers)

    async def stream(self, writer: Writer) -> None:
        """Writes the whole stream. RequestError before the first byte; later faults are events of it."""
        pieces = await self._first_pieces()
        self._writer = writer
        self._context.metrics.streams_open += 1
        try:
            await writer.begin(self._encode(pieces))
            while not self._is_over:
                self._signal = asyncio.get_running_loop().create_future()
                self._outlet.pump = self._pump
                self._pump()
                await self._signal
                self._outlet.pump = None
                if not self._is_over:
                    await writer.drained()
            await writer.finish()
        finally:
            self._stop(None)
            self._outlet.pump = self._writer = None
            self._context.metrics.streams_open -= 1

    def _pump(self) -> None:
        """Writes what the streams have, in the turn of the loop that brought it; never waits."""
        signal, writer = self._signal, self._writer
        if signal is None or writer is None or signal.done():
            return  # over, or nobody reads: text merges meanwhile
        try:
            if self._silent_since_s < writer.last_write_s:
                self._silent_since_s = 0.0
            data = self._encode([(stream, self._take(stream)) for stream in self._outlet.take_ready()])
            reads = writer.send(data) if data else True
        except Exception as error:
            self._stop(error)
            return
        if self._is_over or not reads:
            self._stop(None)
        else:
            self._open_sink(writer)

    def _open_sink(self, writer: Writer) -> None:
        """After its first piece, plain text of an only choice goes from its stream to the writer, and not through here.

        For speed: beside a model on the same cores, each object that a token meets on its way costs cache misses.
        """
        stream = self._streams[0]
        if stream.sink is not None or stream.finished is not None or len(self._streams) > 1:
            return
        if (around := self._form.around(stream.index)) is not None:
            stream.sink = writer.open_texts(around, self._stop)

    def _stop(self, error: Exception | None) -> None:
        """Has `stream` go on: all is said, the client has to read first, or this request's own end, which it raises."""
        for stream in self._streams:
            stream.close_sink()
        if self._signal is not None and not self._signal.done():
            if error is None:
                self._signal.set_result(None)
            else:
                self._signal.set_exception(error)

    async def _first_pieces(self) -> list[tuple[RequestStream, Piece]]:
        """Waits until nothing can be refused any more: every request accepted, and one has output.

        When all are accepted but no output comes within the keep-alive interval, the headers go early.
        """
        pieces: list[tuple[RequestStream, Piece]] = []
        while True:
            for stream in await self._outlet.wait():
                piece = self._take(stream)
                self._raise_failure(piece)
                pieces.append((stream, piece))
            self._raise_if_queue_expired()
            if all(s.accepted is not None or s.first_ns or s.finished for s in self._streams) and (
                pieces or self._silent_since_s
            ):
                return pieces

    def _encode(self, pieces: list[tuple[RequestStream, Piece]]) -> bytes:
        """All events that are due now; sets `_is_over` with the last ones."""
        form = self._form
        parts: list[bytes] = []
        for stream, piece in pieces:
            if (error := _failure_of(piece, self._context)) is not None:
                self._is_over = True
                self._context.failures.note(self.label, error, self._context.clock_s())
                return b"".join(parts) + form.failed(error)
            parts.append(form.frames(stream, piece))
        if self._num_ended == len(self._streams):
            self._is_over = True
            parts.append(form.closing())
        elif self._queue_expired:
            self._is_over = True
            parts.append(form.failed(self._queue_error()))
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        if not data:
            data = self._comment()
        self._silent_since_s = 0.0
        return data

    def _comment(self) -> bytes:
        """A word to a client that waits: when it is new, or when the connection has been silent too long."""
        words = self._waiting_words()
        if not self._silent_since_s and words in (self._last_words, _NOTHING_NEW):
            return b""
        self._last_words = words
        return sse.comment(words)

    def _take(self, stream: RequestStream) -> Piece:
        piece = stream.take()
        if piece.finished is not None:
            self._num_ended += 1
        return piece

    def _raise_failure(self, piece: Piece) -> None:
        if (error := _failure_of(piece, self._context)) is not None:
            raise error

    def _raise_if_queue_expired(self) -> None:
        if self._queue_expired:
            raise self._queue_error()

    def _queue_error(self) -> RequestError:
        retry_s = self._context.admission.retry_after_s(self._context.clock_s())
        return Unavailable("The request waited too long in the queue.", retry_after_s=retry_s, code="queue_timeout")

    def _waiting_words(self) -> str:
        """Where in the queue, or how far in its prompt, the one is that is furthest back; while none has output."""
        if any(stream.first_ns for stream in self._streams):
            return _NOTHING_NEW
        last = max(self._streams, key=lambda stream: (stream.accepted or 0, -stream.num_computed))
        if last.accepted:
            eta_s = self._context.admission.seconds_for(last.accepted, self._context.clock_s())
            return f"queued position={last.accepted} eta={eta_s:.1f}s"
        if last.num_computed:
            return f"prefill {last.num_computed}/{len(last.request.prompt_token_ids) // 4}"
        return _NOTHING_NEW

    def abort(self) -> None:
        """Ends it from outside: the client gets what is there, with finish reason `abort`."""
        self._context.client.expire(self._streams, ABORTED_WORD)

    # ---- what happens because time has passed (called by the Pacer) ---------------------------------------

    def on_tick(self, now_s: float) -> None:
        # Four times a second for every live response: while text flows, no call is made from here.
        writer, job = self._writer, self._job
        if writer is not None and writer.blocked_since_s:
            self._look_at_blocked(writer, now_s)
        elif writer is not None or job.stream:
            since_s = self._began_s if writer is None else writer.last_write_s
            keep_alive_s = self._context.config.api.sse_keep_alive
            if keep_alive_s and now_s - since_s >= keep_alive_s:
                self._silent_since_s = since_s
                self._outlet.wake()
        if job.timeout_s is not None and now_s - self._began_s >= job.timeout_s:
            self._context.client.expire(self._streams)
        elif not self._streams[0].first_ns and self._waits_too_long(now_s):
            self._queue_expired = True
            self._outlet.wake()

    def _waits_too_long(self, now_s: float) -> bool:
        """Nothing has come within the client's own queue time, or no engine takes the request."""
        waited_s = now_s - self._began_s
        if self._job.queue_timeout_s is not None and waited_s >= self._job.queue_timeout_s:
            return not any(stream.first_ns for stream in self._streams)
        limit_s = self._context.config.api.accept_timeout
        if not limit_s or waited_s < limit_s:
            return False
        return not any(stream.first_ns or stream.accepted is not None for stream in self._streams)

    def _look_at_blocked(self, writer: Writer, now_s: float) -> None:
        """A client that does not read keeps only so much: beyond the cap or the time its connection is cut."""
        api = self._context.config.api
        pending = sum(stream.pending_chars for stream in self._streams)
        too_long = api.write_timeout and now_s - writer.blocked_since_s >= api.write_timeout
        if too_long or pending > api.stream_buffer_bytes:
            self._context.metrics.slow_readers_cut += 1
            writer.cut()


def _share_key(request: web.Request, context: ApiContext) -> str:
    """With fair scheduling whose share of the engine it takes, else empty; clients without a key have one together."""
    if context.config.scheduler.scheduling_policy != "fair":
        return ""
    key = given_key(request.headers).encode("utf-8", "surrogatepass")
    return hashlib.sha256(key).hexdigest()[:16]  # the key itself goes no further


def _failure_of(piece: Piece, context: ApiContext) -> RequestError | None:
    record = piece.finished
    if record is None or record.finished.reason != FinishReason.ERROR:
        return None
    return from_failure(record.finished.failure, int(context.config.api.overload_status))
