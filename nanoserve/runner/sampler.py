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


@dataclass(slots=True)
class SampleRows:
    """What S rows ask for; columns [S]. `edits` holds (row, edits, tokens already put out) of some of them."""

    temperature: np.ndarray  # float32
    top_k: np.ndarray  # int64; 0: off
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32
    seeds: np.ndarray  # int64
    positions: np.ndarray  # int64 index of the token in the output
    logit_rows: np.ndarray  # int32, rising: the row of logits that each is drawn from
    edits: list[tuple[int, LogitEdits, int]]

    def without_edits(self) -> SampleRows:
        """The rows whose logits stay as they are."""
        if not self.edits:
            return self
        plain = np.ones(len(self.positions), dtype=bool)
        plain[self.edited] = False
        return self._pick(plain, self.logit_rows[plain])

    def with_edits(self) -> SampleRows:
        """The other rows, to be drawn from `edited_logits`."""
        return self._pick(self.edited, np.arange(len(self.edits), dtype=np.int32))

    @property
    def edited(self) -> np.ndarray:
        """int64, rising: which rows have edits."""
        return np.array([row for row, _, _ in self.edits], dtype=np.int64)

    def _pick(self, which: np.ndarray, logit_rows: np.ndarray) -> SampleRows:
        return SampleRows(
            temperature=self.temperature[which],
            top_k=self.top_k[which],
            top_p=self.top_p[which],
            min_p=self.min_p[which],
            seeds=self.seeds[which],
            positions=self.positions[which],
            logit_rows=logit_rows,
            edits=[],
        )


Choose = Callable[[torch.Tensor, SampleRows], np.ndarray]


def add_edited(token_ids: np.ndarray, logits: torch.Tensor, rows: SampleRows, choose: Choose) -> np.ndarray:
    """integers [S]: a token for each row; `token_ids` are those of `rows.without_edits()`, `choose` is the backend's.

    Draws the others from copies of their logits [N, vocab], which are left as they are.
    """
    if not rows.edits:
        return token_ids
    every = np.empty(len(rows.positions), dtype=np.int64)
    every[rows.edited] = choose(_edited_logits(logits, rows), rows.with_edits())
    every[np.setdiff1d(np.arange(len(every)), rows.edited)] = token_ids
    return every


def choose(logits: torch.Tensor, rows: SampleRows) -> np.ndarray:
    """int64 [S]: a token for each row from logits [N, vocab] as they are, -1 where the largest is not finite."""
    logits = pick_rows(logits, rows.logit_rows)
    broken = ~torch.isfinite(logits.amax(dim=-1)).cpu().numpy()
    is_random = rows.temperature >= GREEDY_TEMPERATURE
    token_ids = np.full(len(broken), -1, dtype=np.int64)
    greedy = np.flatnonzero(~is_random & ~broken)
    if len(greedy):
        token_ids[greedy] = pick_rows(logits, greedy).argmax(dim=-1).cpu().numpy()  # the first of equals
    random = np.flatnonzero(is_random & ~broken)
    if len(random):
        asked = DrawRows(
            temperature=rows.temperature[random],
            top_k=rows.top_k[random],
            top_p=rows.top_p[random],
            min_p=rows.min_p[random],
            uniform=uniforms(rows.seeds[random], rows.positions[random]),
        )
        token_ids[random] = draw(pick_rows(logits, random), asked).cpu().numpy()
    return token_ids


def _edited_logits(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """float32 [E, vocab]: of the rows with edits, after these."""
    values = logits[to_device(rows.logit_rows[rows.edited], logits)]
    apply_edits(values, [edit for _, edit, _ in rows.edits], [count for _, _, count in rows.edits])
    return values
