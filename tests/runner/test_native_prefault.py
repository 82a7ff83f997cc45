"""KV memory becomes real ahead of its use, further while no step runs, and its contents stay."""

from __future__ import annotations

import ctypes
import mmap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoserve.runner.native import prefault
from nanoserve.runner.native.build import missing_cpu_features
from nanoserve.runner.native.memory import allocate
from tests.runner.native_models import IDS, batch_of, make_native, make_spec

pytestmark = pytest.mark.slow

MIB = 1 << 20
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


class NoRoom:
    """A machine that has not quite twice what is missing above the lead in the test below."""

    @staticmethod
    def free_bytes() -> int:
        return 2 * 6 * STRIPES * MIB - 1


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    monkeypatch.setattr(prefault, "LEAD_BYTES", 4 * STRIPES * MIB)
    monkeypatch.setattr(prefault, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(prefault, "others_run", lambda: False)
    return allocate(STRIPES * BLOCKS * BLOCK_BYTES)


def test_memory_is_real_a_lead_ahead_of_the_highest_block(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "others_run", lambda: True)
    memory[5] = 77
    ahead = prefault.Prefault(memory, STRIPES, BLOCKS)
    try:
        wait_for(ahead, 4 * MIB)
        stripes = memory.reshape(STRIPES, -1)
        assert all(num_real(stripe[: 4 * MIB]) == 4 * MIB for stripe in stripes)
        assert all(num_real(stripe[8 * MIB :]) == 0 for stripe in stripes), "that is more than the lead"
        ahead.begin_step()
        ahead.end_step(3)  # 1 MiB of each stripe
        wait_for(ahead, 4 * MIB)
        ahead.end_step(7)
        wait_for(ahead, 6 * MIB)
        assert all(num_real(stripe[: 6 * MIB]) == 6 * MIB for stripe in stripes)
        ahead.end_step(BLOCKS - 1)
        wait_for(ahead, 16 * MIB)
        for thread in ahead._threads:
            thread.join(10)
            assert not thread.is_alive(), "there is nothing left to do"
        assert memory[5] == 77
        assert np.count_nonzero(memory) == 1
    finally:
        ahead.close()


def test_each_piece_is_asked_for_once(memory: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "LEAD_BYTES", memory.nbytes)
    asked, populate = [], prefault._populate
    monkeypatch.setattr(prefault, "_populate", lambda piece: asked.append(piece.ctypes.data) or populate(piece))
    ahead = prefault.Prefault(memory, STRIPES, BLOCKS)
    try:
        wait_for(ahead, 16 * MIB)
        assert sorted(asked) == [memory.ctypes.data + piece for piece in range(0, memory.nbytes, 2 * MIB)]
    finally:
        ahead.close()


def test_while_no_step_runs_all_becomes_real(memory: np.ndarray) -> None:
    ahead = prefault.Prefault(memory, STRIPES, BLOCKS)
    try:
        ahead.begin_step()
        ahead.end_step(23)  # uses 6 MiB
        ahead.begin_step()
        wait_for(ahead, 10 * MIB)
        time.sleep(prefault.REST_SECONDS + 10 * prefault.POLL_SECONDS)
        wait_for(ahead, 10 * MIB)  # no more, for a step runs
        assert all(num_real(stripe[10 * MIB :]) == 0 for stripe in memory.reshape(STRIPES, -1))
        ahead.end_step(23)
        wait_for(ahead, 16 * MIB)
        assert num_real(memory) == memory.nbytes
    finally:
        ahead.close()


@pytest.mark.parametrize(
    "name, value",
    [
        pytest.param("REST_SECONDS", 60.0, id="one step follows another"),
        pytest.param("others_run", lambda: True, id="other processes are busy"),
        pytest.param("HostMemory", lambda: NoRoom, id="others would have too little left"),
    ],
)
def test_it_goes_no_further_than_the_lead(
    name: str, value: Any, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, name, value)
    ahead = prefault.Prefault(memory, STRIPES, BLOCKS)
    try:
        ahead.begin_step()
        ahead.end_step(23)
        wait_for(ahead, 10 * MIB)
        time.sleep(0.05 + 10 * prefault.POLL_SECONDS)
        wait_for(ahead, 10 * MIB)
    finally:
        ahead.close()


@pytest.mark.parametrize(
    "text, busy", [("0.5 0.4 0.3 9999/20000 7", True), ("9.5 9.4 9.3 1/20000 7", False), ("", False)]
)
def test_others_run_where_more_threads_run_than_there_are_cores(text: str, busy: bool, tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text(text)
    assert prefault.others_run(tmp_path / "loadavg") == busy
    assert not prefault.others_run(tmp_path / "none")


class Interrupted:
    """A library whose step is interrupted."""

    def ns_model_step(self, *arguments: Any) -> int:
        raise KeyboardInterrupt

    def ns_model_free(self, model: Any) -> None:
        """What a closing backend calls."""


@pytest.mark.skipif(bool(missing_cpu_features()), reason="the CPU lacks what the engine needs")
def test_a_step_tells_which_blocks_it_used_and_when_it_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault, "LEAD_BYTES", 0)
    monkeypatch.setattr(prefault, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(prefault, "others_run", lambda: True)
    spec = make_spec("llama")
    num_blocks = 64 * MIB * spec.num_layers // make_native(spec).kv_bytes_per_block()
    backend = make_native(spec, num_blocks=num_blocks)
    ahead = backend._prefault
    assert ahead is not None
    assert ahead.num_bytes == 0
    backend.forward(batch_of(IDS[:3], [2], [num_blocks // 4 - 1]))
    wait_for(ahead, 16 * MIB)
    with pytest.raises(ValueError, match="block table"):
        backend.forward(batch_of(IDS[:3], [2], [num_blocks]))
    with monkeypatch.context() as patch:
        patch.setattr(backend, "_library", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            backend.forward(batch_of(IDS[:3], [2], [0]))
    time.sleep(2 * prefault.REST_SECONDS)
    assert ahead._engine_rests()
    backend.forward(batch_of(IDS[:3], [2], [num_blocks // 2 - 1]))
    wait_for(ahead, 32 * MIB)
    backend.close()
