"""ZMQ PUSH/PULL channels that carry `messages`, one encoder or decoder each, reused for life.

The receiver binds, senders connect; a sender may connect before the receiver exists and its messages wait.
No high-water mark: nothing is dropped and nothing blocks inside ZMQ; memory is bounded by admission instead.
A frame that does not decode is dropped and counted (`Inbox.dropped`): one broken peer must not end a loop. A receiver
whose socket file has been removed (someone tidied up the directory) makes it again, so that peers to come find it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import zmq

from nanoserve.ipc.endpoints import is_private

T = TypeVar("T")

_log = logging.getLogger(__name__)
_READABLE = int(zmq.POLLIN)
_MOST_AT_ONCE = 64  # messages that a listener gets in one turn of its loop
LOOK_S = 1.0  # between two looks at a receiver's socket file
RECONNECT_MS = 10  # between a sender's tries; ZMQ's 100 would be most of what a killed detokenizer's streams wait


def _no_limits(socket: zmq.Socket[Any]) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class _Bound:
    """A receiver's address, kept in place: connections that exist live on without it, but new ones need the file."""

    def __init__(self, socket: zmq.Socket[Any], endpoint: str) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._look_due = 0.0
        socket.bind(endpoint)

    def look(self) -> None:
        """Binds again where the file is gone and its directory is there. Called often; looks once a second."""
        now = time.monotonic()
        if now < self._look_due:
            return
        self._look_due = now + LOOK_S
        path = Path(self._endpoint.removeprefix("ipc://"))
        if path.exists() or not is_private(path.parent):
            return
        try:
            self._socket.bind(self._endpoint)
            _log.error("the socket %s was removed: it is there again", path)
        except zmq.ZMQError as error:
            _log.error("the socket %s was removed and cannot be made again: %s", path, error)


class Outbox:
    """The sending end. `send` never blocks: with no high-water mark ZMQ queues in memory."""

    # Set by `nanoserve.child` for `--fault` alone: gets endpoint, frame and the function that sends it.
    tamper: ClassVar[Callable[[str, bytes, Callable[[bytes], object]], None] | None] = None

    def __init__(self, context: zmq.Context[Any], endpoint: str, *, linger_ms: int = 1000) -> None:
        self._socket = context.socket(zmq.PUSH)
        _no_limits(self._socket)
        self._socket.setsockopt(zmq.LINGER, linger_ms)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.connect(endpoint)
        self._encoder = msgspec.msgpack.Encoder()
        self._endpoint = endpoint

    def send(self, message: msgspec.Struct) -> int:
        """Queues one message; returns its size in bytes."""
        frame = self._encoder.encode(message)
        if Outbox.tamper is not None:
            Outbox.tamper(self._endpoint, frame, self._send_frame)
        else:
            self._send_frame(frame)
        return len(frame)

    def _send_frame(self, frame: bytes) -> None:
        self._socket.send(frame, flags=zmq.NOBLOCK, copy=True)

    def close(self) -> None:
        self._socket.close()


class Inbox(Generic[T]):
    """The receiving end for a blocking loop. `types` is the union of messages this process understands."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, types: Any, *, wake_fd: int | None = None) -> None:
        self._socket = context.socket(zmq.PULL)
        _no_limits(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._bound = _Bound(self._socket, endpoint)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(types)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        if wake_fd is not None:
            self._poller.register(wake_fd, zmq.POLLIN)
        self.dropped = 0

    def wait(self, timeout_ms: int) -> bool:
        """Sleeps until something waits, `wake_fd` is readable, or the time is up. True when something waits."""
        return any(source is self._socket for source, _ in self._poller.poll(timeout_ms))

    def drain(self, limit: int = 0) -> list[T]:
        """Takes all that waits (at most `limit` when positive) without sleeping."""
        self._bound.look()
        messages: list[T] = []
        # Asked before each, because an exception costs several times as much, at every step of the engine.
        while (not limit or len(messages) < limit) and self._socket.getsockopt(zmq.EVENTS) & _READABLE:
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK, copy=True)))
            except msgspec.MsgspecError:
                self.dropped += 1
        return messages

    def close(self) -> None:
        self._socket.close()


class AsyncInbox(Generic[T]):
    """The receiving end for an asyncio loop; made and closed inside it.

    It watches ZMQ's file descriptor itself: zmq.asyncio costs about 100 us a message more, at every step of the engine.
    And it calls instead of being awaited: a future and a task's turn cost more than a batch of one row.
    """

    def __init__(self, context: zmq.Context[Any], endpoint: str, types: Any) -> None:
        self._socket = context.socket(zmq.PULL)
        _no_limits(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._bound = _Bound(self._socket, endpoint)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(types)
        self._loop = asyncio.get_running_loop()
        self._take: Callable[[Sequence[T]], None] | None = None
        self._looking: asyncio.TimerHandle | None = None
        self.dropped = 0

    def listen(self, take: Callable[[Sequence[T]], None]) -> None:
        """From now on `take` is called with what has come, in the turn of the loop that finds it. It must not raise."""
        self._take = take
        self._loop.add_reader(self._socket.FD, self._on_readable)
        self._look()

    def close(self) -> None:
        if not self._socket.closed:
            if self._looking is not None:
                self._looking.cancel()
                self._loop.remove_reader(self._socket.FD)
            self._socket.close()

    def _look(self) -> None:
        """By the clock: whoever would wake this loop may not find it. Binding swallows what the descriptor told."""
        self._bound.look()
        self._on_readable()
        self._looking = self._loop.call_later(LOOK_S, self._look)

    def _on_readable(self) -> None:
        """The descriptor tells of edges, so everything is taken: what stays would not be told again."""
        if self._socket.closed or self._take is None:
            return
        messages: list[T] = []
        while self._socket.getsockopt(zmq.EVENTS) & _READABLE:  # as in `Inbox.drain`
            if len(messages) == _MOST_AT_ONCE:
                self._loop.call_soon(self._on_readable)  # the loop's other work comes first, however fast they come
                break
            try:
                messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except msgspec.MsgspecError:
                self.dropped += 1
        if messages:
            self._take(messages)
