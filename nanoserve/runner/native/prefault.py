"""Makes KV memory real ahead of its use, so that no step pays for pages that nobody touched before.

Used by `backend`. Threads of the engine process, which the system runs only where a core has nothing else to do.

The layers lie one after the other, so a step whose requests come to fresh blocks touches a fresh huge page in every
layer, all at once. In a virtual machine whose host has to find that memory first a huge page takes 1 to 5 ms: 140 ms in
one step, or 8 % of the time in which prompts are computed. To touch everything before the server is ready would take
seconds, hence a lead over the blocks in use. But even idle priority takes its time from a step (the system does not
leave off in the middle of a huge page), so all of the memory becomes real while nothing runs: as a rule a gigabyte
takes two or three seconds after the start. From then on no load can find that the system has not enough of it, either.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nanoserve.runner.free_memory import HostMemory

_PIECE = 2 << 20  # bytes at a time: a huge page
_MADV_POPULATE_WRITE = 23  # Linux 5.14; elsewhere memory becomes real when it is touched
LEAD_BYTES = 256 << 20
LEAST_BYTES = 64 << 20  # a smaller pool is not worth a thread
REST_SECONDS = 0.05  # without a step, and the engine rests
_LOAD = Path("/proc/loadavg")
POLL_SECONDS = 0.2  # between looks at whether it rests
NO_ROOM_SECONDS = 10.0  # the same where memory is short
_MAX_THREADS = 4  # each finds memory at the same speed beside the others, and has layers of its own


class Prefault:
    """Keeps the first blocks of `memory` real: those up to the last one used, and LEAD_BYTES more; at rest all of
    them, as long as the system keeps at least as much for others as this takes.

    `memory` is [num_stripes][num_blocks] with equal bytes for each block: one stripe per layer.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], num_stripes: int, num_blocks: int) -> None:
        self._memory = memory
        self._host = HostMemory()
        self._stripe_bytes = memory.nbytes // num_stripes
        self._block_bytes = self._stripe_bytes / max(num_blocks, 1)
        self._lead = LEAD_BYTES // num_stripes
        self._wanted = min(self._lead, self._stripe_bytes)  # bytes of each stripe
        self._in_step = False
        self._step_ended = 0.0  # time.monotonic()
        self._stopping = False
        ids = range(min(len(os.sched_getaffinity(0)), num_stripes, _MAX_THREADS))
        self._num_bytes = [0 for _ in ids]  # by thread
        self._wakes = [threading.Event() for _ in ids]
        self._threads = [threading.Thread(target=self._work, args=(i,), name="prefault", daemon=True) for i in ids]
        for thread in self._threads:
            thread.start()
        self._wake()

    @property
    def num_bytes(self) -> int:
        """Of each stripe that are real, or were tried to be."""
        return min(self._num_bytes)

    def begin_step(self) -> None:
        self._in_step = True

    def end_step(self, highest_block: int) -> None:
        """The step used blocks up to this one. Costs nothing but for new heights."""
        self._step_ended = time.monotonic()
        self._in_step = False
        used = int((highest_block + 1) * self._block_bytes)
        wanted = min(used + self._lead, self._stripe_bytes)
        if wanted >= min(self._wanted + _PIECE, self._stripe_bytes) > self._wanted:
            self._wanted = wanted
            self._wake()

    def close(self) -> None:
        """Ends the threads; the memory may be given back afterwards."""
        self._stopping = True
        self._wake()
        for thread in self._threads:
            thread.join()

    def _wake(self) -> None:
        for wake in self._wakes:
            wake.set()

    def _work(self, thread: int) -> None:
        with contextlib.suppress(OSError, AttributeError):  # not on Linux
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread's alone
        can_populate = True
        while can_populate and not self._stopping and self._num_bytes[thread] < self._stripe_bytes:
            is_short = self._engine_rests() and not self._is_room(self._num_bytes[thread])
            self._wakes[thread].wait(NO_ROOM_SECONDS if is_short else POLL_SECONDS)
            self._wakes[thread].clear()
            while can_populate and self._has_to_do(thread):
                can_populate = self._make_real(thread)

    def _has_to_do(self, thread: int) -> bool:
        num_bytes = self._num_bytes[thread]
        if self._stopping or num_bytes >= self._stripe_bytes:
            return False
        return num_bytes < self._wanted or (self._engine_rests() and not others_run() and self._is_room(num_bytes))

    def _engine_rests(self) -> bool:
        return not self._in_step and time.monotonic() - self._step_ended > REST_SECONDS

    def _is_room(self, num_bytes: int) -> bool:
        """Whether others are left with at least as much memory as what is missing here: they may have come later."""
        missing = (self._stripe_bytes - num_bytes) * (self._memory.nbytes // self._stripe_bytes)
        return self._host.free_bytes() >= 2 * missing

    def _make_real(self, thread: int) -> bool:
        """The next piece of this thread's stripes, again what a step interrupts. False where the system cannot."""
        begin, step = self._num_bytes[thread], len(self._threads)
        end = min(begin + _PIECE, self._stripe_bytes)
        for stripe in range(thread * self._stripe_bytes, self._memory.nbytes, step * self._stripe_bytes):
            if not self._has_to_do(thread):
                return True
            if not _populate(self._memory[stripe + begin : stripe + end]):
                return False
        self._num_bytes[thread] = end
        return True


def others_run(load: Path = _LOAD) -> bool:
    """Whether more threads want to run, this one included, than there are cores. False where that is not known."""
    try:
        num_running = int(load.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return False
    return num_running > (os.cpu_count() or 1)


def _populate(memory: npt.NDArray[np.uint8]) -> bool:
    """Makes these bytes real without changing them; False where the system cannot."""
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = memory.ctypes.data + memory.nbytes
    # Through ctypes, which gives the interpreter lock back during the call; mmap's method does not.
    madvise = ctypes.CDLL(None).madvise
    failed: int = madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE)
    return not failed
