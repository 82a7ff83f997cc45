"""Makes KV memory real a little ahead of its use, so that no step pays for pages that nobody touched before.

Used by `backend`. A thread of the engine process, which the system runs only where a core has nothing else to do.

The layers lie one after the other, so a step whose requests come to fresh blocks touches a fresh huge page in every
layer, all at once. In a virtual machine whose host has to find that memory first a huge page takes 2.4 ms: 140 ms in
one step, or 10 % of the time in which a prompt is computed. To touch everything at the start would take seconds, and
the memory of a pool that may never be used; hence a lead over the blocks in use.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading

import numpy as np
import numpy.typing as npt

_PIECE = 2 << 20  # bytes at a time: a huge page
_MADV_POPULATE_WRITE = 23  # Linux 5.14; elsewhere memory becomes real when it is touched
LEAD_BYTES = 256 << 20
LEAST_BYTES = 64 << 20  # a smaller pool is not worth a thread


class Prefault:
    """Keeps the first blocks of `memory` real: those up to the last one used, and LEAD_BYTES more.

    `memory` is [num_stripes][num_blocks] with equal bytes for each block: one stripe per layer.
    """

    def __init__(self, memory: npt.NDArray[np.uint8], num_stripes: int, num_blocks: int) -> None:
        self._memory = memory
        self._stripe_bytes = memory.nbytes // num_stripes
        self._block_bytes = self._stripe_bytes / max(num_blocks, 1)
        self._lead = LEAD_BYTES // num_stripes  # bytes of each stripe
        self._wanted = min(self._lead, self._stripe_bytes)
        self._wake = threading.Event()
        self._wake.set()
        self._stopping = False
        self.num_bytes = 0  # of each stripe that are real, or were tried to be
        self._thread = threading.Thread(target=self._work, name="prefault", daemon=True)
        self._thread.start()

    def use(self, block: int) -> None:
        """A step uses blocks up to this one. Costs nothing but for new heights."""
        wanted = int((block + 1) * self._block_bytes) + self._lead
        if wanted >= self._wanted + _PIECE:
            self._wanted = min(wanted, self._stripe_bytes)
            self._wake.set()

    def close(self) -> None:
        """Ends the thread; the memory may be given back afterwards."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # not on Linux
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # this thread's alone
        while not self._stopping and self.num_bytes < self._stripe_bytes:
            self._wake.wait()
            self._wake.clear()
            while self.num_bytes < self._wanted and not self._stopping:
                piece = min(_PIECE, self._stripe_bytes - self.num_bytes)
                for stripe in range(0, self._memory.nbytes, self._stripe_bytes):
                    if self._stopping or not _populate(self._memory[stripe + self.num_bytes :][:piece]):
                        return
                self.num_bytes += piece


def _populate(memory: npt.NDArray[np.uint8]) -> bool:
    """Makes these bytes real without changing them; False where the system cannot."""
    begin = memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    end = memory.ctypes.data + memory.nbytes
    # Through ctypes, which gives the interpreter lock back during the call; mmap's method does not.
    madvise = ctypes.CDLL(None).madvise
    failed: int = madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE)
    return not failed
