"""Drawing tokens with the C++ engine: `runner.sampler.choose` in a tenth of the time. Used by `backend` and tests."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.runner.backend import Int32
from nanoserve.runner.native.library import Draw
from nanoserve.runner.sampler import SampleRows


@dataclass(slots=True)
class Draws:
    """What the library is asked to draw, and the arrays that it reads and writes meanwhile."""

    raw: Draw
    token_ids: Int32  # [S], by the library; -1 where the largest logit is not finite
    columns: list[np.ndarray]

    @classmethod
    def of(cls, rows: SampleRows, logits: torch.Tensor) -> Draws:
        """From float32 logits [N, vocab], whose rows lie in one piece each; `edits` are not applied."""
        columns = [
            np.ascontiguousarray(column, dtype)
            for column, dtype in (
                (rows.logit_rows, np.int32),
                (rows.temperature, np.float32),
                (rows.top_p, np.float32),
                (rows.min_p, np.float32),
                (rows.top_k, np.int64),
                (rows.seeds, np.int64),
                (rows.positions, np.int64),
            )
        ]
        token_ids: Int32 = np.empty(len(rows.positions), np.int32)
        addresses = [column.ctypes.data for column in (*columns, token_ids)]
        raw = Draw(len(token_ids), logits.shape[1], logits.stride(0), logits.data_ptr(), *addresses)
        return cls(raw, token_ids, columns)


def choose(library: ctypes.CDLL, model: int | None, logits: torch.Tensor, rows: SampleRows) -> Int32:
    """A token for each row, from float32 logits [N, vocab]; -1 where the largest is not finite.

    Without a model the calling thread works alone.
    """
    draws = Draws.of(rows, logits if logits.stride(1) == 1 else logits.contiguous())
    if library.ns_model_draw(model, ctypes.byref(draws.raw)):
        raise MemoryError(f"no memory to draw {len(draws.token_ids)} tokens")
    return draws.token_ids
