"""`python -m nanoserve.bench.micro`: what the wire costs, without a model.

Encodes and decodes the messages of one step with 1 to 256 rows, beside the same data as one struct per row, and
times a one-way ZMQ hop between two processes. One thread; median (min..max) of the repetitions.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq

from nanoserve import bench
from nanoserve.bench.stats import percentile, spread
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.messages import TextBatch, TokenBatch

REPETITIONS = 7


class RowMessage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The alternative that was not taken: one struct per row."""

    request_id: int
    first_index: int
    token_ids: list[int]


class RowsMessage(msgspec.Struct, frozen=True, array_like=True, tag=99, gc=False):
    rows: list[RowMessage]


def _time_us(call: Callable[[], Any], number: int) -> list[float]:
    call()
    times = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        for _ in range(number):
            call()
        times.append((time.perf_counter() - started) / number * 1e6)
    return times


def _token_batch(rows: int) -> TokenBatch:
    return TokenBatch(
        engine_index=0,
        incarnation=1,
        step=1000,
        request_ids=[(1 << 40) + i for i in range(rows)],
        first_index=[100 + i for i in range(rows)],
        num_tokens=[1] * rows,
        token_ids=pack_ids(1000 + i for i in range(rows)),
    )


def _text_batch(rows: int) -> TextBatch:
    batch = _token_batch(rows)
    return TextBatch(
        detok_index=0,
        incarnation=1,
        engine_index=0,
        engine_incarnation=1,
        step=1000,
        request_ids=batch.request_ids,
        deltas=[" token"] * rows,
        char_offset=[500 + i for i in range(rows)],
        first_index=batch.first_index,
        num_tokens=batch.num_tokens,
        token_ids=batch.token_ids,
    )


def _codec(name: str, message: msgspec.Struct, number: int) -> None:
    encoder = msgspec.msgpack.Encoder()
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(type(message))
    frame = encoder.encode(message)
    encode = spread(_time_us(lambda: encoder.encode(message), number), 2)
    decode = spread(_time_us(lambda: decoder.decode(frame), number), 2)
    print(f"| {name} | {len(frame)} | {encode} | {decode} |")


def _answer(endpoint: str, ready: Connection) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.bind(endpoint)
    ready.send(True)
    hops = []
    while sent := inbox.recv():
        hops.append((time.monotonic_ns() - int.from_bytes(sent[:8], "little")) / 1e3)
    ready.send(hops)


def _hop(size: int, count: int = 2000) -> list[float]:
    """One-way times in microseconds of `count` messages sent one at a time to a sleeping process."""
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{directory}/hop.sock"
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_answer, args=(endpoint, theirs))
        process.start()
        ours.recv()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        outbox = context.socket(zmq.PUSH)
        outbox.connect(endpoint)
        for _ in range(count):
            outbox.send(time.monotonic_ns().to_bytes(8, "little") + bytes(size - 8))
            time.sleep(0.0005)
        outbox.send(b"")
        hops: list[float] = ours.recv()
        process.join()
        outbox.close()
        context.term()
    return hops


def main() -> None:
    bench.parser("micro", __doc__).parse_args()
    print("| message | bytes | encode us | decode us |\n|---|---|---|---|")
    for rows in (1, 32, 256):
        number = 200_000 // (rows + 20)
        batch = _token_batch(rows)
        _codec(f"TokenBatch, {rows} rows", batch, number)
        ids = unpack_ids(batch.token_ids)
        columns = zip(batch.request_ids, batch.first_index, ids, strict=True)
        _codec(
            f"the same as a struct per row, {rows}", RowsMessage([RowMessage(r, f, [t]) for r, f, t in columns]), number
        )
        _codec(f"TextBatch, {rows} rows", _text_batch(rows), number)
    for size in (64, 4096):
        hops = _hop(size)
        print(f"ZMQ ipc hop, {size} bytes: p50 {percentile(hops, 0.5):.0f} us, p99 {percentile(hops, 0.99):.0f} us")


if __name__ == "__main__":
    main()
