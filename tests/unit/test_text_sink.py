"""Plain text goes from its stream to its sink: once, in order, merged between two flushes, and never past its end."""

from __future__ import annotations

import asyncio
import errno
import socket
import sys
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from nanoserve.api import event_writer
from nanoserve.api.engine_client import EngineClient, NewRequest
from nanoserve.api.event_writer import EventWriter
from nanoserve.api.stream import Outlet, RequestStream
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.ids import RequestIdAllocator
from nanoserve.ipc.messages import Finished, FinishReason, SamplingParams, TextBatch, TextFinished, TextSpec


class Sink:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def send_text(self, text: str) -> None:
        self.texts.append(text)


def make_streams(count: int, interval: int = 1) -> tuple[EngineClient, list[RequestStream], list[Outlet]]:
    """Live streams that have shown their first token "a"."""
    clock = iter(range(1, 10**6))
    client = EngineClient(RequestIdAllocator(0, 1), lambda message: None, lambda: next(clock))
    outlets = [Outlet() for _ in range(count)]
    new = NewRequest(prompt_token_ids=[1], sampling=SamplingParams(), text=TextSpec(), interval=interval)
    streams = [client.submit(new, outlet) for outlet in outlets]
    client.deliver(rows(streams, "a", 0))
    for stream, outlet in zip(streams, outlets, strict=True):
        assert outlet.take_ready() == [stream] and stream.take().text == "a"
    return client, streams, outlets


def rows(
    streams: list[RequestStream], text: str, position: int, finished: list[TextFinished] | None = None
) -> TextBatch:
    count = len(streams)
    return TextBatch(
        detok_index=0,
        incarnation=1,
        engine_index=0,
        engine_incarnation=1,
        step=1,
        request_ids=[stream.request_id for stream in streams],
        deltas=[text] * count,
        char_offset=[position] * count,
        first_index=[position] * count,
        num_tokens=[len(text)] * count,
        token_ids=pack_ids([7] * len(text) * count),
        finished=finished or [],
    )


def test_what_comes_between_two_flushes_is_one_text() -> None:
    client, (stream,), (outlet,) = make_streams(1)
    stream.sink = sink = Sink()
    client.deliver(rows([stream], "b", 1))
    client.deliver(rows([stream], "c", 2))
    client.deliver(rows([stream], "bc", 1))  # a repeat
    assert sink.texts == []
    client.flush()
    client.flush()
    client.deliver(rows([stream], "d", 3))
    client.flush()
    assert sink.texts == ["bc", "d"] and outlet.take_ready() == [] and client._due == []


def test_the_interval_holds_and_the_rest_comes_with_the_end() -> None:
    client, (stream,), (outlet,) = make_streams(1, interval=3)
    stream.sink = sink = Sink()
    for position, char in enumerate("bcdef", start=1):
        client.deliver(rows([stream], char, position))
        client.flush()
    assert sink.texts == ["bcd"]
    end = TextFinished(Finished(request_id=stream.request_id, reason=FinishReason.LENGTH, num_output_tokens=7))
    client.deliver(rows([stream], "g", 6, finished=[end]))
    client.flush()
    assert sink.texts == ["bcd"] and outlet.take_ready() == [stream]
    piece = stream.take()
    assert (piece.text, piece.finished) == ("efg", end)


def test_a_closed_sink_leaves_what_is_due_to_the_outlet() -> None:
    client, (stream,), (outlet,) = make_streams(1)
    stream.sink = sink = Sink()
    client.deliver(rows([stream], "b", 1))
    stream.close_sink()
    stream.close_sink()
    client.flush()
    client.deliver(rows([stream], "c", 2))
    assert sink.texts == [] and outlet.take_ready() == [stream] and stream.take().text == "bc"


class Transport:
    def __init__(self) -> None:
        self.data = b""
        self.unread = 0
        self.closing = False

    def is_closing(self) -> bool:
        return self.closing

    def write(self, data: bytes) -> None:
        self.data += data

    def get_write_buffer_size(self) -> int:
        return self.unread


def make_writer() -> tuple[EventWriter, Transport, list[Exception | None]]:
    """As after `begin`."""
    transport, stops = Transport(), list[Exception | None]()
    writer = EventWriter(SimpleNamespace(), {}, lambda: 5.0)  # type: ignore[arg-type]
    writer._transport = transport  # type: ignore[assignment]
    writer.open_texts((b"data: {", b"}\n\n"), stops.append)
    return writer, transport, stops


def test_the_writer_escapes_text_and_tells_of_what_stops_it() -> None:
    writer, transport, stops = make_writer()
    writer.send_text('a "quote"\n')
    assert transport.data == b'data: {"a \\"quote\\"\\n"}\n\n' and stops == []
    transport.unread = 1 << 20
    writer.send_text("b")
    assert stops == [None] and writer.blocked_since_s == 5.0
    transport.closing = True
    writer.send_text("c")
    assert isinstance(stops[1], ConnectionResetError) and b'"c"' not in transport.data


async def test_bytes_stay_in_order_between_the_socket_and_its_transport() -> None:
    """A socket that is full takes a part of an event; the rest, and what follows, waits in the transport."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4608)
    transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
    writer, _, stops = make_writer()
    writer._transport, writer._descriptor = transport, ours.fileno()  # type: ignore[assignment]
    texts = [f"{number:04} " * 200 for number in range(12)]
    for text in texts[:6]:
        writer.send_text(text)
    assert transport.get_write_buffer_size() > 0, "the socket took it all"
    reader, reader_writer = await asyncio.open_connection(sock=theirs)
    events = [await reader.readuntil(b"\n\n") for _ in texts[:6]]
    for text in texts[6:]:
        writer.send_text(text)
        events.append(await reader.readuntil(b"\n\n"))
    assert [event.decode() for event in events] == [f'data: {{"{text}"}}\n\n' for text in texts] and stops == []
    reader_writer.close()
    transport.close()
    await reader_writer.wait_closed()


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EPIPE, errno.ECONNRESET])
def test_whatever_the_network_says_is_a_client_that_has_gone(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was unplugged is no fault of this server's: Python has classes of their own for these errors."""

    def fail(descriptor: int, data: bytes) -> int:
        raise OSError(number, "as the network says")

    monkeypatch.setattr(event_writer.os, "write", fail)
    writer, transport, stops = make_writer()
    writer._descriptor = 0
    writer.send_text("a")
    assert isinstance(stops[0], ConnectionResetError) and transport.data == b""


async def test_a_client_that_has_gone_stops_its_writer() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    writer, transport, stops = make_writer()
    writer._descriptor = ours.fileno()
    writer.send_text("a")
    ours.close()
    assert isinstance(stops[0], ConnectionResetError) and transport.data == b""


@pytest.mark.parametrize("count", [8, 32])
def test_a_token_costs_four_calls(count: int) -> None:
    """From the batch to the transport: push_row, flush, send_text, send. Beside a model each runs with cold caches."""
    client, streams, _ = make_streams(count)
    for stream in streams:
        stream.sink = make_writer()[0]
    batch = rows(streams, "b", 1)
    calls: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and "/api/" in frame.f_code.co_filename:
            calls.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        client.deliver(batch)
        client.flush()
    finally:
        sys.setprofile(None)
    assert all(calls.count(name) == count for name in ("push_row", "send_text", "send"))
    assert len(calls) <= 4 * count + 8, calls
