"""Ids, packed columns, endpoints and channels: the parts of the wire under the messages."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from nanoserve.ipc.channels import RECONNECT_MS, AsyncInbox, Inbox, Outbox
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.endpoints import create_run_dir, remove_run_dir
from nanoserve.ipc.ids import RequestIdAllocator, api_incarnation, api_index
from nanoserve.ipc.messages import AbortCause, AbortRequest, EngineInbox, Release, TokenBatch


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    packed = pack_ids(ids)
    assert len(packed) == 4 * len(ids)
    assert unpack_ids(packed) == ids


def test_packed_ids_are_little_endian_int32() -> None:
    assert pack_ids([1, -2]) == b"\x01\x00\x00\x00\xfe\xff\xff\xff"


def test_an_id_over_32_bits_is_refused() -> None:
    with pytest.raises(OverflowError):
        pack_ids([2**31])
    with pytest.raises(ValueError):
        unpack_ids(b"abc")


@pytest.mark.rule(15)
@given(st.integers(0, 255), st.integers(0, 2**20))
def test_request_ids_name_their_api_and_its_life(index: int, incarnation: int) -> None:
    allocator = RequestIdAllocator(index, incarnation)
    first, second = allocator.next(), allocator.next()
    assert first != second
    assert 0 < first < 2**63
    assert api_index(first) == index
    assert api_incarnation(first) == incarnation % 2**15


@pytest.mark.rule(5, 15)
def test_ids_of_two_lives_never_meet() -> None:
    old, new = RequestIdAllocator(0, 1), RequestIdAllocator(0, 2)
    assert not {old.next() for _ in range(100)} & {new.next() for _ in range(100)}


@pytest.mark.rule(5, 6)
def test_the_run_directory_is_private_and_its_names_fit_a_socket(tmp_path: Path) -> None:
    endpoints = create_run_dir()
    try:
        assert stat.S_IMODE(endpoints.run_dir.stat().st_mode) == 0o700
        assert len(endpoints.supervisor().removeprefix("ipc://")) <= 107
    finally:
        remove_run_dir(endpoints)
    assert not endpoints.run_dir.exists()


@pytest.mark.rule(6)
def test_a_long_parent_is_passed_over(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    endpoints = create_run_dir(deep)
    try:
        assert len(os.fsencode(endpoints.supervisor())) < 120
    finally:
        remove_run_dir(endpoints)


@pytest.mark.rule(40)
def test_messages_sent_before_the_receiver_exists_arrive_in_order(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/x.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = Outbox(context, endpoint)
    outbox.send(AbortRequest(request_ids=[1, 2], cause=AbortCause.CLIENT_GONE))
    outbox.send(Release(request_ids=[3]))
    inbox: Inbox[EngineInbox] = Inbox(context, endpoint, EngineInbox)
    received: list[EngineInbox] = []
    while len(received) < 2:
        assert inbox.wait(5000)
        received += inbox.drain()
    assert received == [AbortRequest(request_ids=[1, 2], cause=AbortCause.CLIENT_GONE), Release(request_ids=[3])]
    outbox.close()
    inbox.close()
    context.term()


def test_a_sender_looks_often_for_a_receiver_that_is_not_there_yet(tmp_path: Path) -> None:
    """It is what streams wait for once a killed process is back. Told by ZMQ's own word of when it tries again."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = Outbox(context, f"ipc://{tmp_path}/x.sock")
    monitor = outbox._socket.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
    waits = []
    for _ in range(5):
        assert monitor.poll(5000)
        waits.append(recv_monitor_message(monitor)["value"])  # ms
    assert max(waits) <= 2 * RECONNECT_MS  # ZMQ spreads them, up to twice what it is told
    monitor.close()
    outbox.close()
    context.term()


@pytest.mark.rule(7)
def test_a_broken_frame_is_dropped_counted_and_harms_nobody(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/x.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[EngineInbox] = Inbox(context, endpoint, EngineInbox)
    raw = context.socket(zmq.PUSH)
    raw.connect(endpoint)
    raw.send(b"\xc1 not msgpack")
    outbox = Outbox(context, endpoint)
    outbox.send(TokenBatch(engine_index=0, incarnation=1, step=1))  # a message of another edge
    outbox.send(Release(request_ids=[7]))
    received: list[EngineInbox] = []
    while len(received) + inbox.dropped < 3:
        assert inbox.wait(5000)
        received += inbox.drain()
    assert received == [Release(request_ids=[7])]
    assert inbox.dropped == 2
    raw.close()
    outbox.close()
    inbox.close()
    context.term()


def test_a_removed_socket_file_comes_back_and_connections_live_on(tmp_path: Path, monkeypatch: Any) -> None:
    """A directory for temporary files may be tidied up under a server that has been running for weeks."""
    monkeypatch.setattr("nanoserve.ipc.channels.LOOK_S", 0.0)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    endpoint = f"ipc://{directory}/x.sock"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: Inbox[EngineInbox] = Inbox(context, endpoint, EngineInbox)
    old = Outbox(context, endpoint)

    def receive(number: int) -> None:
        assert inbox.wait(5000)
        assert inbox.drain() == [Release(request_ids=[number])]

    old.send(Release(request_ids=[1]))
    receive(1)
    shutil.rmtree(directory)
    assert inbox.drain() == [] and not directory.exists()
    old.send(Release(request_ids=[2]))
    receive(2)
    directory.mkdir(mode=0o755)  # by somebody else, perhaps
    assert inbox.drain() == [] and not list(directory.iterdir())
    directory.chmod(0o700)
    assert inbox.drain() == [] and [path.name for path in directory.iterdir()] == ["x.sock"]
    new = Outbox(context, endpoint)
    new.send(Release(request_ids=[3]))
    receive(3)
    for socket in (old, new, inbox):
        socket.close()
    context.term()


async def test_a_loop_that_nobody_can_reach_makes_its_socket_again_by_itself(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("nanoserve.ipc.channels.LOOK_S", 0.01)
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox: AsyncInbox[EngineInbox] = AsyncInbox(context, f"ipc://{directory}/x.sock", EngineInbox)
    shutil.rmtree(directory)
    came: asyncio.Queue[Sequence[EngineInbox]] = asyncio.Queue()
    inbox.listen(came.put_nowait)
    await asyncio.sleep(0.05)
    directory.mkdir(mode=0o700)
    outbox = Outbox(context, f"ipc://{directory}/x.sock")
    outbox.send(Release(request_ids=[1]))
    assert list(await asyncio.wait_for(came.get(), 10)) == [Release(request_ids=[1])]
    outbox.close()
    inbox.close()
    context.term()


def test_a_wake_fd_ends_the_wait_without_a_message(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    read_end, write_end = os.pipe()
    inbox: Inbox[EngineInbox] = Inbox(context, f"ipc://{tmp_path}/x.sock", EngineInbox, wake_fd=read_end)
    os.write(write_end, b"x")
    assert inbox.wait(60_000) is False  # the test's own time limit would catch a sleep
    inbox.close()
    context.term()
    os.close(read_end)
    os.close(write_end)
