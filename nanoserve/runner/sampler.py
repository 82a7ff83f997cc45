"""From logits to tokens, all rows of a step at once; rows that ask for more than the largest logit pay for it alone.

Owner: the engine process, called by `model_runner`. Order: edits (`logit_edits`), temperature, min-p, top-k, top-p.
A token is drawn by inverting the cumulative distribution at one uniform number, which depends on the request's seed
and the output position only (`philox`). Candidates stand in a fixed order: by id, or where top-k or top-p cut the
distribution, by falling probability and then by id. Every reduction of a row has an order of its own, so a row's
draw is the same alone and in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanoserve.runner.logit_edits import LogitEdits, apply_edits
from nanoserve.runner.philox import uniforms

GREEDY_TEMPERATURE = 1e-5  # below it, the largest logit
_WIDTHS = (64, 1024)  # candidates that are sorted before the whole vocabulary is
_SUM_CHUNK = 1024


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


def sample(logits: torch.Tensor, rows: SampleRows) -> Sampled:
    """One token for each row of float32 logits [S, vocab], which are left as they are."""
    top, token_ids = logits.max(dim=-1)  # the first of equals
    random = np.flatnonzero(rows.temperature >= GREEDY_TEMPERATURE)
    if not rows.edits and not len(random):
        return Sampled(token_ids.cpu().numpy(), ~torch.isfinite(top).cpu().numpy())
    edited = np.array([row for row, _, _ in rows.edits], dtype=np.int64)
    touched = np.union1d(edited, random)
    work = logits[_index(touched, logits)]  # a copy
    if rows.edits:
        places = _index(np.searchsorted(touched, edited), logits)
        values = work[places]
        apply_edits(values, [edit for _, edit, _ in rows.edits], [count for _, _, count in rows.edits])
        work[places] = values
        top[_index(edited, logits)], token_ids[_index(edited, logits)] = values.max(dim=-1)
    if len(random):
        chosen = work[_index(np.searchsorted(touched, random), logits)]
        token_ids[_index(random, logits)] = _draw(chosen, rows, random)
    return Sampled(token_ids.cpu().numpy(), ~torch.isfinite(top).cpu().numpy())


def _draw(logits: torch.Tensor, rows: SampleRows, random: np.ndarray) -> torch.Tensor:
    """int64 [N] for the N rows `random` with (edited) logits [N, vocab]."""
    vocab_size = logits.shape[1]
    temperature, min_p = rows.temperature[random], rows.min_p[random]
    top_k, top_p = rows.top_k[random], rows.top_p[random]
    uniform = torch.from_numpy(uniforms(rows.seeds[random], rows.positions[random])).to(logits.device)
    weights = logits / _column(temperature, logits)
    weights = weights.sub_(weights.amax(dim=-1, keepdim=True)).exp_()  # of the most likely token: 1
    if (min_p > 0).any():
        weights = weights.masked_fill_(weights < _column(min_p, logits), 0.0)
    top_k = np.where((top_k <= 0) | (top_k >= vocab_size), vocab_size, top_k)
    cut = (top_k < vocab_size) | (top_p < 1.0)
    token_ids = torch.empty(len(random), dtype=torch.int64, device=logits.device)
    if not cut.all():
        plain = _index(np.flatnonzero(~cut), logits)
        token_ids[plain] = _invert(weights[plain], uniform[plain])
    # Try the narrowest sort first; rows whose candidates do not fit go on to the next.
    left = np.flatnonzero(cut)
    for width in (*[w for w in _WIDTHS if w < vocab_size], vocab_size):
        if not len(left):
            break
        index = _index(left, logits)
        picked, fits = _draw_cut(logits[index], weights[index], uniform[index], top_k[left], top_p[left], width)
        token_ids[index[fits]] = picked[fits]
        left = left[~fits.cpu().numpy()]
    return token_ids


def _draw_cut(
    logits: torch.Tensor,
    weights: torch.Tensor,
    uniform: torch.Tensor,
    top_k: np.ndarray,
    top_p: np.ndarray,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws by top-k, then top-p of what is left, among the `width` most likely ids: [N] ids, and whether they suffice.

    Sorted are the logits, not the weights, so that ids whose weights round to the same number keep their order. They
    do not suffice either when the last one taken equals the last one sorted: an equal with a lower id may be missing.
    """
    sorted_logits, ids = top_sorted(logits, width)
    values = weights.gather(1, ids)
    limit = torch.from_numpy(top_k).to(weights.device)[:, None]
    place = torch.arange(width, device=weights.device)
    values = values * (place < limit)
    wanted = torch.from_numpy(top_p.astype(np.float64)).to(weights.device)[:, None]
    below = values.double().cumsum(dim=-1)
    # Of a row that top-k does not cut within the width, the mass is the whole vocabulary's.
    in_width = limit <= width
    mass = torch.where(in_width, below[:, -1:], row_sums(weights)[:, None].double())
    kept = (below - values) < wanted * mass
    kept[:, 0] = True
    last = kept.sum(dim=-1, keepdim=True) - 1
    fits = (in_width | (below[:, -1:] >= wanted * mass)) & (sorted_logits.gather(1, last) > sorted_logits[:, -1:])
    if width == weights.shape[1]:
        fits = torch.ones_like(fits)
    place = _invert(values * kept, uniform)
    return ids.gather(1, place[:, None])[:, 0], fits[:, 0]


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds uniform * total; weights [N, M], uniform float64 [N]."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    place = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return place.clamp_(max=weights.shape[1] - 1)  # only a broken row gets there


def top_sorted(x: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row of x [N, V] and their ids, falling; equal values by rising id."""
    if width >= x.shape[1]:
        values, ids = torch.sort(x, dim=-1, descending=True, stable=True)
        return values, ids
    ids = torch.topk(x, width, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(x.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of the rows of x [N, V], in an order that does not depend on N.

    A plain sum of one long row is split over threads; the pieces here are too short for that.
    """
    x = F.pad(x, (0, -x.shape[1] % _SUM_CHUNK))
    return x.view(x.shape[0], -1, _SUM_CHUNK).sum(dim=-1).sum(dim=-1)


def _index(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rows).to(like.device)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)[:, None]
