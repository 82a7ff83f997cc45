"""The edge of the server: connections, header limits and times, and errors that come before any handler.

Owner process: api. `process` opens it on the socket it was given and closes it at the end. aiohttp's own answers to
broken HTTP become our envelope; a connection that sends no headers in time is told so and closed.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from nanoserve.api.errors import envelope_bytes, http_error
from nanoserve.config import ApiConfig
from nanoserve.errors import RequestError, StartupError

log = logging.getLogger(__name__)

_LINGER_S = 2.0  # for a refused client to stop sending its body
_MAX_UNSENT_BYTES = 64 << 10
_RETRY_S = 5  # for connections to end; nothing measures how long they last
_CLOSE_S = 2.0  # for handlers to write their last words


class Connection(web.RequestHandler):
    """One client connection. `headers_seen` is called by the middleware of every request."""

    __slots__ = ("_header_timer", "_limits", "_num_unread", "_write_timer")

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop, limits: ApiConfig) -> None:
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        self._limits = limits
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=limits.http_keep_alive,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's annotation forgets that None is off
            logger=log,
            max_line_size=limits.max_header_bytes,
            max_field_size=limits.max_header_bytes,
            max_headers=limits.max_headers,
            lingering_time=_LINGER_S,
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._manager is not None and len(self._manager.connections) > self._limits.max_connections:
            self._refuse(http_error(503, "Too many connections."))
        elif self._limits.header_timeout:
            self._header_timer = self._loop.call_later(self._limits.header_timeout, self._on_header_timeout)

    def connection_lost(self, exc: BaseException | None) -> None:
        self.headers_seen()
        self._end_write_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client has not read what was sent. From now on it has to make progress, whatever kind of answer it is."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        self._end_write_timer()
        super().resume_writing()

    def _await_reading(self) -> None:
        if self._limits.write_timeout and self.transport is not None:
            self._num_unread = self.transport.get_write_buffer_size()
            self._write_timer = self._loop.call_later(self._limits.write_timeout, self._on_write_timeout)

    def _on_write_timeout(self) -> None:
        self._write_timer = None
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() < self._num_unread:
            self._await_reading()
        else:
            self.transport.abort()

    def _end_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def headers_seen(self) -> None:
        """The first request is here: from now on the keep-alive time bounds the waiting."""
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What the HTTP parser refuses, and errors that escape even the middleware."""
        self.headers_seen()
        if isinstance(exc, LineTooLong) or (message and "header" in message.lower() and "many" in message.lower()):
            error = http_error(431, "The request's headers or its path are too large.")
        elif status < 500:
            error = http_error(400, "This is not a valid HTTP request.")
        else:
            log.error("a request failed inside the server", exc_info=exc)
            error = http_error(500, "Internal server error.")
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun, so the connection is closed instead")
        response = web.Response(body=envelope_bytes(error), status=error.status, content_type="application/json")
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """What escaped a handler. The rest of a body that cannot be decoded is no news: its client has the 400."""
        if not isinstance(kwargs.get("exc_info"), web.RequestPayloadError):
            super().log_exception(*args, **kwargs)

    def _on_header_timeout(self) -> None:
        self._header_timer = None
        self._refuse(http_error(408, "No request came in time."))

    def _refuse(self, error: RequestError) -> None:
        """Answers without a request, and closes."""
        body = envelope_bytes(error)
        retry = f"Retry-After: {_RETRY_S}\r\n" if error.status == 503 else ""
        head = (
            f"HTTP/1.1 {error.status} Refused\r\nContent-Type: application/json\r\n{retry}"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        if self.transport is not None:
            self.transport.write(head.encode() + body)
            self.transport.close()


class Edge:
    """The listening side of one api process."""

    def __init__(self, app: web.Application, config: ApiConfig) -> None:
        # a client that hangs up cancels its handler, whatever that waits for
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSE_S)
        self._config = config
        self._server: asyncio.AbstractServer | None = None

    async def open(self, listen_socket: socket.socket) -> None:
        """Accepts from now on."""
        await self._runner.setup()
        manager = self._runner.server
        assert manager is not None  # `setup` made it
        loop = asyncio.get_running_loop()
        if listen_socket.family != socket.AF_UNIX:
            # accepted connections inherit it: what a client does not read waits here, where it is bounded, and not in
            # the kernel, which would take megabytes for each
            listen_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT_BYTES)

        def connection() -> Connection:
            return Connection(manager, loop=loop, limits=self._config)

        is_unix = listen_socket.family == socket.AF_UNIX
        create = loop.create_unix_server if is_unix else loop.create_server
        self._server = await create(connection, sock=listen_socket, backlog=1024, ssl=tls_context(self._config))

    async def close(self) -> None:
        """Stops accepting, gives handlers a moment, closes every connection."""
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()


def tls_context(config: ApiConfig) -> ssl.SSLContext | None:
    """None without a certificate; StartupError when it cannot be used."""
    if not config.ssl_certfile:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None)
    except (OSError, ssl.SSLError) as error:
        raise StartupError(f"cannot use the certificate {config.ssl_certfile}: {error}") from error
    return context
