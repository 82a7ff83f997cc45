"""KV memory becomes real ahead of its use, as far as the lead reaches, and its contents stay."""

from __future__ import annotations

import ctypes
import mmap
import time

import numpy as np
import pytest

from nanoserve.runner.native import prefault
from nanoserve.runner.native.memory import allocate

pytestmark = pytest.mark.slow

STRIPES, BLOCKS, BLOCK_BYTES = 3, 64, 1 << 18  # of each stripe: 16 MiB


def num_real(memory: np.ndarray) -> int:
    """Bytes of it that the system holds."""
    pages = memory.nbytes // mmap.PAGESIZE
    seen = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), seen) == 0
    return sum(flag & 1 for flag in seen) * mmap.PAGESIZE


def wait_for(ahead: prefault.Prefault, num_bytes: int) -> None:
    deadline = time.monotonic() + 30
    while ahead.num_bytes < num_bytes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ahead.num_bytes == num_bytes


def test_memory_is_real_a_lead_ahead_of_the_highest_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "LEAD_BYTES", 4 * STRIPES << 20)
    memory = allocate(STRIPES * BLOCKS * BLOCK_BYTES)
    memory[5] = 77
    ahead = prefault.Prefault(memory, STRIPES, BLOCKS)
    try:
        wait_for(ahead, 4 << 20)
        stripes = memory.reshape(STRIPES, -1)
        assert all(num_real(stripe[: 4 << 20]) == 4 << 20 for stripe in stripes)
        assert all(num_real(stripe[8 << 20 :]) == 0 for stripe in stripes), "that is more than the lead"
        ahead.use(3)  # 1 MiB of each stripe
        wait_for(ahead, 4 << 20)
        ahead.use(BLOCKS // 2 - 1)
        wait_for(ahead, 12 << 20)
        assert all(num_real(stripe[: 12 << 20]) == 12 << 20 for stripe in stripes)
        ahead.use(BLOCKS - 1)
        wait_for(ahead, 16 << 20)
        ahead._thread.join(10)
        assert not ahead._thread.is_alive(), "there is nothing left to do"
        assert memory[5] == 77
        assert np.count_nonzero(memory) == 1
    finally:
        ahead.close()
