"""The ledger adds up, counts touched pages only, and follows claims."""

from __future__ import annotations

import ctypes
import mmap
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from nanoserve.api.engine_client import EngineClient, NewRequest
from nanoserve.api.stream import Outlet, RequestStream
from nanoserve.config import DetokConfig
from nanoserve.detok.manager import DetokManager
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.ids import RequestIdAllocator
from nanoserve.ipc.messages import Opened, SamplingParams, TextSpec, TokenBatch
from nanoserve.obs import memory
from tests.unit.detok_tokenizers import byte_level

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "_claims", {})
    monkeypatch.setattr(memory, "_counts", {})
    yield


def address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_only_touched_pages_count() -> None:
    buffer = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer[: 8 * MIB] = b"x" * (8 * MIB)
    assert not any(buffer[32 * MIB : 48 * MIB : memory._PAGE])  # reading maps the page of zeros, which costs nothing
    memory.claim("kv cache", address(buffer), 64 * MIB)
    held = memory.ledger()["kv cache"]
    assert 8 * MIB <= held <= 10 * MIB


def test_the_parts_add_up_to_the_resident_memory() -> None:
    buffer = mmap.mmap(-1, 32 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer[:] = b"x" * (32 * MIB)
    memory.claim("weights", address(buffer), 20 * MIB)
    memory.claim("kv cache", address(buffer) + 20 * MIB, 12 * MIB)
    ledger = memory.ledger()
    rss = psutil.Process().memory_info().rss
    assert abs(ledger["rss"] - rss) < 0.1 * rss
    assert sum(size for owner, size in ledger.items() if owner != "rss") == ledger["rss"]
    assert ledger["weights"] == 20 * MIB and ledger["kv cache"] == 12 * MIB
    assert ledger["heap"] > 0 and ledger["code and files"] > 0


def test_a_mapped_file_is_taken_from_the_files(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"x" * (16 * MIB))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert mapped[:: memory._PAGE]
        before = memory.ledger()
        where = ctypes.c_char.from_buffer(mapped)
        memory.claim("weights", ctypes.addressof(where), 16 * MIB)
        after = memory.ledger()
        del where
    assert after["weights"] == 16 * MIB
    assert abs(before["code and files"] - after["code and files"] - 16 * MIB) < MIB


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.memory"
    assert memory.read_ledger(path) == {}
    memory.write_ledger(path)
    assert memory.read_ledger(path)["rss"] > MIB
    path.write_bytes(b"{")
    assert memory.read_ledger(path) == {}


def test_what_an_owner_counts_is_taken_from_the_heap() -> None:
    before = memory.ledger()
    memory.count("states", lambda: 1 * MIB)
    after = memory.ledger()
    assert after["states"] == 1 * MIB
    assert abs(before["heap"] - after["heap"] - 1 * MIB) < MIB
    memory.count("states", lambda: 1 << 50)  # a count is an estimate: it never makes the sum larger than what is there
    assert memory.ledger()["heap"] == 0


def held_by(work: Callable[[], object]) -> int:
    tracemalloc.start()
    kept = work()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept is not None
    return held


def test_the_counts_of_streams_and_states_are_near_the_truth() -> None:
    client = EngineClient(RequestIdAllocator(0, 1), lambda message: None, lambda: 1)
    manager = DetokManager(byte_level(), DetokConfig())
    spec = msgspec.msgpack.encode(TextSpec(prompt_tail=(1, 2, 3)))
    ids = list(range(1, 1001))

    def live_streams() -> list[RequestStream]:
        new = NewRequest(prompt_token_ids=[7000] * 100, sampling=SamplingParams(seed=1), text=TextSpec())
        streams = [client.submit(new, Outlet()) for _ in ids]
        for stream in streams:
            for index in range(30):
                stream.push_row(f"some {index}", stream.num_chars, index, [1000 + index])
        return streams

    def live_states() -> DetokManager:
        manager.process([TokenBatch(0, 1, 1, opened=[Opened(request_id, spec) for request_id in ids])])
        tokens = pack_ids([65] * len(ids))
        manager.process([TokenBatch(0, 1, 2, ids, [0] * len(ids), [1] * len(ids), tokens)])
        return manager

    held = held_by(live_streams)
    assert 0.6 * held < client.stream_bytes() < 1.6 * held
    held = held_by(live_states)
    assert 0.6 * held < manager.state_bytes() < 1.6 * held
