"""From logits to tokens, all rows of a step at once; rows that ask for more than the largest logit pay for it alone.

Owner: the engine process, called by `model_runner`; a backend draws with `choose`, or faster, and rows without edits
within the step that makes their logits. Order: edits
(`logit_edits`), then temperature, min-p, top-k and top-p (`draw`). A draw uses one uniform number, which depends on the
request's seed and the output position only (`philox`), and every reduction of a row has an order of its own: the token
is the same alone and in any batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.runner.draw import DrawRows, draw, pick_rows, to_device
from nanoserve.runner.logit_edits import LogitEdits, apply_edits
from nanoserve.runner.philox import uniforms

GREEDY_TEMPERATURE = 1e-5  # below it, the largest logit


# What a row asks for. The backend in C++ reads these records as they are (csrc/model.h: NsDrawRow).
SAMPLE_ROW = np.dtype(
    [
        ("seed", np.int64),
        ("position", np.int64),  # index of the token in the output
        ("top_k", np.int64),  # 0: off
        ("logit_row", np.int32),  # of the logits, from which this is drawn
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
    ]
)


@dataclass(slots=True)
class SampleRows:
    """S rows, by rising logit row. `edits` holds (row, edits, tokens already put out) of some of them."""

    asked: np.ndarray  # SAMPLE_ROW [S]
    edits: list[tuple[int, LogitEdits, int]]

    def without_edits(self) -> SampleRows:
        """The rows whose logits stay as they are."""
        return SampleRows(np.delete(self.asked, self.edited), []) if self.edits else self

    @property
    def edited(self) -> list[int]:
        """Which rows have edits, rising."""
        return [row for row, _, _ in self.edits]


Choose = Callable[[torch.Tensor, SampleRows], np.ndarray]


def add_edited(token_ids: np.ndarray, logits: torch.Tensor, rows: SampleRows, choose: Choose) -> np.ndarray:
    """integers [S]: a token for each row; `token_ids` are those of `rows.without_edits()`, `choose` is the backend's.

    Draws the others from copies of their logits [N, vocab], which are left as they are.
    """
    if not rows.edits:
        return token_ids
    edited, every = rows.edited, np.empty(len(rows.asked), dtype=np.int64)
    asked = rows.asked[edited]
    asked["logit_row"] = np.arange(len(edited))
    every[edited] = choose(_edited_logits(logits, rows), SampleRows(asked, []))
    every[np.delete(np.arange(len(every)), edited)] = token_ids
    return every


def choose(logits: torch.Tensor, rows: SampleRows) -> np.ndarray:
    """int64 [S]: a token for each row from logits [N, vocab] as they are, -1 where the largest is not finite."""
    every = rows.asked
    logits = pick_rows(logits, every["logit_row"])
    broken = ~torch.isfinite(logits.amax(dim=-1)).cpu().numpy()
    is_random = every["temperature"] >= GREEDY_TEMPERATURE
    token_ids = np.full(len(broken), -1, dtype=np.int64)
    greedy = np.flatnonzero(~is_random & ~broken)
    if len(greedy):
        token_ids[greedy] = pick_rows(logits, greedy).argmax(dim=-1).cpu().numpy()  # the first of equals
    random = np.flatnonzero(is_random & ~broken)
    if len(random):
        columns = {name: every[name][random] for name in SAMPLE_ROW.names or ()}
        asked = DrawRows(
            temperature=columns["temperature"],
            top_k=columns["top_k"],
            top_p=columns["top_p"],
            min_p=columns["min_p"],
            uniform=uniforms(columns["seed"], columns["position"]),
        )
        token_ids[random] = draw(pick_rows(logits, random), asked).cpu().numpy()
    return token_ids


def _edited_logits(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """float32 [E, vocab]: of the rows with edits, after these."""
    values = logits[to_device(rows.asked["logit_row"][rows.edited], logits)]
    apply_edits(values, [edit for _, edit, _ in rows.edits], [count for _, _, count in rows.edits])
    return values
