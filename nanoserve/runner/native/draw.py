"""Drawing tokens with the C++ engine: `runner.sampler.choose` in a tenth of the time. Used by `backend` and tests."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from nanoserve.runner.backend import Int32
from nanoserve.runner.native.library import Draw
from nanoserve.runner.sampler import SampleRows


def choose(library: ctypes.CDLL, model: int | None, logits: torch.Tensor, rows: SampleRows) -> Int32:
    """A token for each row of float32 logits [S, vocab], -1 where the largest is not finite; `edits` are not applied.

    Without a model the calling thread works alone.
    """
    logits = logits.contiguous()
    columns = [
        np.ascontiguousarray(column, dtype)
        for column, dtype in (
            (rows.temperature, np.float32),
            (rows.top_p, np.float32),
            (rows.min_p, np.float32),
            (rows.top_k, np.int64),
            (rows.seeds, np.int64),
            (rows.positions, np.int64),
        )
    ]
    token_ids: Int32 = np.empty(len(logits), np.int32)
    draw = Draw(
        len(logits),
        logits.shape[1],
        logits.data_ptr(),
        *(column.ctypes.data for column in columns),
        token_ids.ctypes.data,
    )
    if library.ns_model_draw(model, ctypes.byref(draw)):
        raise MemoryError(f"no memory to draw {len(logits)} tokens")
    return token_ids
