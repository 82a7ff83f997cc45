"""Writes the events of one response straight into its transport.

Owner process: api, used by `respond` only. A wake-up of a task and a future per event cost more than the event itself,
so after the headers `send` is called from the loop's turn that brought the text. A client that does not read makes
`send` return False; the writer then waits in `drained` while text merges in the streams.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import msgspec
from aiohttp import web

from nanoserve.api.sse import Around
from nanoserve.api.stream import TextSink

_HIGH_WATER_BYTES = 64 * 1024  # the transport pauses its writer there
_encode = msgspec.json.Encoder().encode


def _nothing(error: Exception | None) -> None:
    """Nobody has opened a sink."""


class EventWriter:
    """One response of `text/event-stream`."""

    __slots__ = (
        "_around",
        "_chunked",
        "_clock_s",
        "_descriptor",
        "_on_stop",
        "_request",
        "_transport",
        "blocked_since_s",
        "last_write_s",
        "response",
    )

    def __init__(self, request: web.Request, headers: dict[str, str], clock_s: Callable[[], float]) -> None:
        self._request = request
        self.response = web.StreamResponse(headers=headers)
        self._clock_s = clock_s
        self._chunked = False
        self._transport: asyncio.Transport | None = None
        self._descriptor: int | None = None  # of the socket, where the transport adds nothing to the bytes
        self._around = (b"", b"")
        self._on_stop: Callable[[Exception | None], None] = _nothing
        self.last_write_s = clock_s()
        self.blocked_since_s = 0.0  # 0: the client reads

    async def begin(self, data: bytes) -> None:
        """Sends the headers and the first events, if there are any, in one write."""
        response = self.response
        await response.prepare(self._request)
        self._transport = transport = self._request.transport
        if transport is not None and transport.get_extra_info("sslcontext") is None:
            self._descriptor = transport.get_extra_info("socket").fileno()
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        if data:
            self.blocked_since_s = self._clock_s()  # a first event larger than the buffers waits here
            await response.write(data)
            self.blocked_since_s = 0.0
        else:
            self._request.writer.send_headers()
        self.last_write_s = self._clock_s()

    def send(self, data: bytes) -> bool:
        """Queues events. False when the client has to read first; ConnectionResetError when it has gone."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client has gone")
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self.last_write_s = self._clock_s()
        if self._descriptor is not None and not transport.get_write_buffer_size():
            # The transport would queue the bytes and write them later in this turn, at a tenth of a token's whole cost.
            try:
                num_sent = os.write(self._descriptor, data)
            except BlockingIOError:
                num_sent = 0
            except OSError as error:  # reset, timed out, unreachable: the network's words for the same
                raise ConnectionResetError("the client has gone") from error
            if num_sent == len(data):
                return True
            data = data[num_sent:]
        transport.write(data)
        if transport.get_write_buffer_size() <= _HIGH_WATER_BYTES:
            return True
        self.blocked_since_s = self.last_write_s
        return False

    def open_texts(self, around: Around, on_stop: Callable[[Exception | None], None]) -> TextSink:
        """A sink for the text of an only choice. `on_stop` gets an error, or None when the client has to read first."""
        self._around = around
        self._on_stop = on_stop
        return self

    def send_text(self, text: str) -> None:
        before, after = self._around
        try:
            reads = self.send(before + _encode(text) + after)
        except Exception as error:
            self._on_stop(error)  # this response's own end
        else:
            if not reads:
                self._on_stop(None)

    async def drained(self) -> None:
        """Returns when the client has read enough."""
        await self._request.writer.drain()
        self.blocked_since_s = 0.0

    async def finish(self) -> None:
        """Ends the body; the connection stays usable."""
        await self.response.write_eof()

    def cut(self) -> None:
        """Ends the connection without a word: the client does not read anyway."""
        if self._transport is not None:
            self._transport.abort()
