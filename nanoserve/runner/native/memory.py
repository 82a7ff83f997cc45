"""Large zeroed memory on huge pages where the system gives them: weights and KV cache are read at DRAM speed.

Used by `packing`, `backend` and, for the torch backend, `runner.kv_cache`.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import numpy.typing as npt

from nanoserve.errors import StartupError
from nanoserve.obs.memory import claim

_HUGE_PAGE = 2 << 20


def allocate(num_bytes: int, owner: str = "") -> npt.NDArray[np.uint8]:
    """Anonymous memory of `num_bytes`, zero, 2 MiB aligned; pages become real when they are touched.

    `owner` is its name in the memory ledger; none for memory that does not live long. StartupError without memory.
    """
    try:
        mapping = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        what = owner or "the model's weights"
        raise StartupError(f"the system has no {num_bytes / 2**30:.1f} GiB of memory for {what}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower by some percent, nothing else
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    memory = whole[start : start + num_bytes]
    if owner:
        claim(owner, memory.ctypes.data, num_bytes)
    return memory
