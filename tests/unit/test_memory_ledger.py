"""The ledger adds up, counts touched pages only, and follows claims."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nanoserve.obs import memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_claims(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(memory, "_claims", {})
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
