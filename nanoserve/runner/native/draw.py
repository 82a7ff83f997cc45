"""Drawing tokens with the C++ engine: `runner.sampler.choose` in a tenth of the time. Used by `backend` and tests."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from nanoserve.runner.backend import Int32
from nanoserve.runner.native.library import Draw
from nanoserve.runner.sampler import SampleRows


def begin(logits: int, vocab_size: int, stride: int, rows: SampleRows) -> tuple[Draw, Int32]:
    """What to ask of the library, and the ids that it will write; `rows` and both must live until then.

    `logits`: address of float32 [N, vocab], `stride` floats from row to row; `edits` are not applied.
    """
    count = len(rows.asked)
    token_ids: Int32 = np.empty(count, np.int32)
    return Draw(count, vocab_size, stride, rows.asked.ctypes.data, logits, token_ids.ctypes.data), token_ids


def choose(library: ctypes.CDLL, model: int | None, logits: torch.Tensor, rows: SampleRows) -> Int32:
    """A token for each row from float32 logits [N, vocab]; -1 where the largest is not finite.

    Without a model the calling thread works alone.
    """
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    draw, token_ids = begin(logits.data_ptr(), logits.shape[1], logits.stride(0), rows)
    if library.ns_model_draw(model, ctypes.byref(draw)):
        raise MemoryError(f"no memory to draw {len(token_ids)} tokens")
    return token_ids
