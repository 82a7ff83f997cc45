"""From submitted requests to the bytes of one HTTP answer, unary or streamed; the same for every endpoint.

Owner process: api. The first update is awaited before the status line, so what can be refused gets a real 4xx or 5xx.
However a response ends (done, error, client gone, deadline), `respond` ends its requests in the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import web

from nanoserve.api import sse
from nanoserve.api.context import ApiContext
from nanoserve.api.engine_client import ABORTED_WORD, NewRequest
from nanoserve.api.errors import Unavailable, from_failure
from nanoserve.api.http import request_label
from nanoserve.api.results import Choice, ResponseFormat
from nanoserve.api.stream import Outlet, Piece, RequestStream
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import AbortCause, FinishReason

JSON = "application/json"
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
    """Runs the job and answers. RequestError before the first byte becomes the status line (`app` writes it)."""
    num_requests = len(job.requests)
    context.admission.admit(num_requests, context.clock_s())
    outlet = Outlet()
    streams: list[RequestStream] = []
    exchange = Exchange(request, context, job, form, outlet, streams)
    context.pacer.add(exchange)
    try:
        streams.extend(context.client.submit(new, outlet) for new in job.requests)
        return await (exchange.stream() if job.stream else exchange.unary())
    finally:
        context.pacer.remove(exchange)
        context.client.abort(streams, AbortCause.CLIENT_GONE)  # only those that still live: the client has gone
        context.admission.leave(num_requests, context.clock_s())


class Exchange:
    """One HTTP request while it is answered."""

    def __init__(
        self,
        request: web.Request,
        context: ApiContext,
        job: Job,
        form: ResponseFormat,
        outlet: Outlet,
        streams: list[RequestStream],
    ) -> None:
        self._request = request
        self._context = context
        self._job = job
        self._form = form
        self._outlet = outlet
        self._streams = streams
        self._num_ended = 0
        self.labels = {job.label, request_label(request)} - {""}
        self._began_s = context.clock_s()
        self._last_write_s = self._began_s
        self._write_began_s = 0.0  # 0: no write is waiting for the client
        self._comment_due = False
        self._queue_expired = False

    async def unary(self) -> web.Response:
        choices = {stream.request_id: Choice(stream.index) for stream in self._streams}
        while self._num_ended < len(self._streams):
            for stream in await self._outlet.wait():
                piece = self._take(stream)
                self._raise_failure(piece)
                choices[stream.request_id].add(piece)
            self._raise_if_queue_expired()
        body = self._form.body(sorted(choices.values(), key=lambda choice: choice.index))
        return web.Response(body=body, content_type=JSON, headers=self._job.headers)

    async def stream(self) -> web.StreamResponse:
        pieces = await self._first_pieces()
        response = web.StreamResponse(headers={**_SSE_HEADERS, **self._job.headers})
        self._context.metrics.streams_open += 1
        try:
            await response.prepare(self._request)
            await self._write_all(response, pieces)
            await response.write_eof()
        except ConnectionResetError:
            pass  # a client that goes away is not a fault; `respond` ends its requests
        finally:
            self._context.metrics.streams_open -= 1
        return response

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
                pieces or self._comment_due
            ):
                return pieces

    async def _write_all(self, response: web.StreamResponse, pieces: list[tuple[RequestStream, Piece]]) -> None:
        form = self._form
        while True:
            parts: list[bytes] = []
            for stream, piece in pieces:
                if (error := _failure_of(piece)) is not None:
                    await self._write(response, b"".join(parts) + form.failed(error))
                    return
                parts.append(form.frames(stream, piece))
            if self._num_ended == len(self._streams):
                parts.append(form.closing())
            data = b"".join(parts)
            if not data and self._comment_due:
                data = sse.comment(self._waiting_words())
            if data:
                await self._write(response, data)
            if self._num_ended == len(self._streams):
                return
            pieces = [(stream, self._take(stream)) for stream in await self._outlet.wait()]
            if self._queue_expired:
                await self._write(response, form.failed(self._queue_error()))
                return

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        self._comment_due = False
        clock_s = self._context.clock_s
        self._write_began_s = clock_s()
        try:
            await response.write(data)
        finally:
            self._last_write_s = clock_s()
            self._write_began_s = 0.0

    def _take(self, stream: RequestStream) -> Piece:
        piece = stream.take()
        if piece.finished is not None:
            self._num_ended += 1
        return piece

    def _raise_failure(self, piece: Piece) -> None:
        if (error := _failure_of(piece)) is not None:
            raise error

    def _raise_if_queue_expired(self) -> None:
        if self._queue_expired:
            raise self._queue_error()

    def _queue_error(self) -> RequestError:
        retry_s = self._context.admission.retry_after_s(self._context.clock_s())
        return Unavailable("The request waited too long in the queue.", retry_after_s=retry_s, code="queue_timeout")

    def _waiting_words(self) -> str:
        positions = [s.accepted for s in self._streams if s.accepted is not None and not s.first_ns]
        return f"queued position={max(positions)}" if positions and max(positions) > 0 else "keep-alive"

    def abort(self) -> None:
        """Ends it from outside: the client gets what is there, with finish reason `abort`."""
        self._context.client.expire(self._streams, ABORTED_WORD)

    # ---- what happens because time has passed (called by the Pacer) ---------------------------------------

    def on_tick(self, now_s: float) -> None:
        api = self._context.config.api
        if self._write_began_s:
            self._end_stuck_writer(now_s)
            return
        if self._job.stream and api.sse_keep_alive and now_s - self._last_write_s >= api.sse_keep_alive:
            self._comment_due = True
            self._outlet.wake()
        job = self._job
        if job.timeout_s is not None and now_s - self._began_s >= job.timeout_s:
            self._context.client.expire(self._streams)
        elif job.queue_timeout_s is not None and now_s - self._began_s >= job.queue_timeout_s:
            self._queue_expired = not any(stream.first_ns for stream in self._streams)
            if self._queue_expired:
                self._outlet.wake()

    def _end_stuck_writer(self, now_s: float) -> None:
        """A client that does not read keeps only so much: beyond the cap or the time its connection is cut."""
        api = self._context.config.api
        pending = sum(stream.pending_chars for stream in self._streams)
        too_long = api.write_timeout and now_s - self._write_began_s >= api.write_timeout
        if (too_long or pending > api.stream_buffer_bytes) and self._request.transport is not None:
            self._context.metrics.slow_readers_cut += 1
            self._request.transport.abort()


def _failure_of(piece: Piece) -> RequestError | None:
    record = piece.finished
    if record is None or record.finished.reason != FinishReason.ERROR:
        return None
    return from_failure(record.finished.failure)
