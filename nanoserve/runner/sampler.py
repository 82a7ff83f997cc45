"""From logits to tokens, all rows of a step at once; rows that ask for more than the largest logit pay for it alone.

Owner: the engine process, called by `model_runner`; a backend draws with `choose`, or faster. Order: edits
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
    edits: list[tuple[int, LogitEdits, int]]


@dataclass(slots=True)
class Sampled:
    token_ids: np.ndarray  # integers [S]
    broken: np.ndarray  # bool [S]: the row has no finite largest logit, its token means nothing


Choose = Callable[[torch.Tensor, SampleRows], np.ndarray]


def sample(logits: torch.Tensor, rows: SampleRows, choose: Choose) -> Sampled:
    """One token for each row of float32 logits [S, vocab], which are left as they are; `choose`: the backend's."""
    token_ids = choose(_edited(logits, rows) if rows.edits else logits, rows)
    return Sampled(token_ids, token_ids < 0)


def choose(logits: torch.Tensor, rows: SampleRows) -> np.ndarray:
    """int64 [S]: a token for each row of logits as they are, -1 where the largest is not a finite number."""
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


def _edited(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """A copy with the edits of the rows that have some."""
    logits = logits.clone()
    index = to_device(np.array([row for row, _, _ in rows.edits], dtype=np.int64), logits)
    values = logits[index]
    apply_edits(values, [edit for _, edit, _ in rows.edits], [count for _, _, count in rows.edits])
    logits[index] = values
    return logits
