"""Drawing a token from each row of logits: temperature, min-p, top-k, top-p, and one uniform number per row.

Called by `sampler`. The cumulative distribution is inverted over candidates in a fixed order: by id, or, where top-k or
top-p cut the distribution, by falling logit and then by id. No sort of the vocabulary: what can be kept is first
narrowed by a threshold that only the row itself decides, so that its draw is the same alone and in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

_PIECE = 256  # ids; a distribution is inverted piece by piece, then inside one (a long cumulative sum is slow)
_TOP_PIECE = 64
# Weights, relative to the most likely id's, at which a top-p row is tried to be cut before all of it is sorted.
_CUTS = (0.1, 0.01, 1e-3, 1e-4)


@dataclass(slots=True)
class DrawRows:
    """What N rows ask for; columns [N]."""

    temperature: np.ndarray  # float32, positive
    top_k: np.ndarray  # int64; 0: off
    top_p: np.ndarray  # float32; 1: off
    min_p: np.ndarray  # float32; 0: off
    uniform: np.ndarray  # float64 in [0, 1)

    def pick(self, rows: np.ndarray) -> DrawRows:
        return DrawRows(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.uniform[rows]
        )


def draw(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """int64 [N]: a token for each row of logits [N, vocab], whose largest values are finite."""
    vocab_size = logits.shape[1]
    has_top_k = (rows.top_k > 0) & (rows.top_k < vocab_size)
    is_narrow = has_top_k & (rows.top_k <= vocab_size // _TOP_PIECE)
    is_plain = ~has_top_k & (rows.top_p >= 1.0)
    token_ids = torch.empty(len(is_plain), dtype=torch.int64, device=logits.device)
    for chosen, how in (
        (np.flatnonzero(is_plain), _draw_plain),
        (np.flatnonzero(is_narrow), _draw_narrow),
        (np.flatnonzero(~is_plain & ~is_narrow), _draw_wide),
    ):
        if len(chosen):
            token_ids[to_device(chosen, logits)] = how(pick_rows(logits, chosen), rows.pick(chosen))
    return token_ids


def _draw_plain(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), rows)
    return _invert_long(weights, to_device(rows.uniform, logits))


def _draw_narrow(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Top-k with a small k, then top-p of what is left: only the candidates are ever weighed."""
    ids, values = _sorted_candidates(logits, logits >= _kth_piece_top(logits, rows.top_k))
    weights = _weights(values, values[:, :1], rows)
    return _draw_sorted(ids, weights, rows, None)


def _draw_wide(logits: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Top-p alone, or a large top-k: the narrowest cut that holds enough, else everything is sorted."""
    weights = _weights(logits, logits.amax(dim=-1, keepdim=True), rows)
    mass = row_sums(weights)[:, None].double()
    wanted = _column(rows.top_p.astype(np.float64), logits) * mass
    is_candidate = torch.ones_like(logits, dtype=torch.bool)
    left = np.flatnonzero((rows.top_k <= 0) | (rows.top_k >= logits.shape[1]))
    for cut in _CUTS:
        if not len(left):
            break
        index = to_device(left, logits)
        some = pick_rows(weights, left)
        above = some >= cut
        fits = (row_sums(some * above)[:, None] >= wanted[index])[:, 0]
        is_candidate[index[fits]] = above[fits]
        left = left[~fits.cpu().numpy()]
    ids, values = _sorted_candidates(logits, is_candidate)
    return _draw_sorted(ids, weights.gather(1, ids) * (values > float("-inf")), rows, mass)


def _weights(logits: torch.Tensor, top: torch.Tensor, rows: DrawRows) -> torch.Tensor:
    """Relative to the most likely id's, whose logit is `top` [N, 1]; 0 below min-p."""
    weights = (logits - top).div_(_column(rows.temperature, logits)).exp_()
    if (rows.min_p > 0).any():
        weights = weights.masked_fill_(weights < _column(rows.min_p, logits), 0.0)
    return weights


def _draw_sorted(ids: torch.Tensor, weights: torch.Tensor, rows: DrawRows, mass: torch.Tensor | None) -> torch.Tensor:
    """Draws among ids [N, M], the most likely first. `mass` [N, 1] is that of a row without top-k; None: no such."""
    limit = _column(np.where(rows.top_k > 0, rows.top_k, np.iinfo(np.int64).max), ids)
    weights = weights * (torch.arange(ids.shape[1], device=ids.device) < limit)
    below = weights.cumsum(dim=-1, dtype=torch.float64)
    total = below[:, -1:] if mass is None else torch.where(limit <= ids.shape[1], below[:, -1:], mass)
    kept = (below - weights) < _column(rows.top_p.astype(np.float64), ids) * total
    kept[:, 0] = True
    chosen = _invert(weights * kept, to_device(rows.uniform, ids))
    return ids.gather(1, chosen[:, None])[:, 0]


def _kth_piece_top(logits: torch.Tensor, top_k: np.ndarray) -> torch.Tensor:
    """[N, 1]: the k-th largest of the tops of the pieces. At least k logits are not below it, and few more."""
    num_pieces = logits.shape[1] // _TOP_PIECE
    pieces = logits[:, : num_pieces * _TOP_PIECE].reshape(len(logits), num_pieces, _TOP_PIECE)
    tops = pieces.amax(dim=-1).sort(dim=-1, descending=True).values
    return tops.gather(1, _column(top_k - 1, logits))


def _sorted_candidates(logits: torch.Tensor, is_candidate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and logits [N, M] of the candidates by falling logit, then by id; shorter rows end in minus infinity.

    Sorted are logits, not weights, so that ids whose weights round to the same number keep their order.
    """
    rows, ids = is_candidate.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(logits))
    place = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    width = int(counts.max())
    padded = torch.zeros(len(logits), width, dtype=torch.int64, device=logits.device)
    padded[rows, place] = ids
    values = logits.new_full((len(logits), width), float("-inf"))
    values[rows, place] = logits[rows, ids]
    values, order = torch.sort(values, dim=-1, descending=True, stable=True)
    return padded.gather(1, order), values


def _invert_long(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """`_invert` over the vocabulary: first the piece, then the id inside it."""
    pieces = F.pad(weights, (0, -weights.shape[1] % _PIECE)).view(len(weights), -1, _PIECE)
    sums = pieces.sum(dim=-1)
    piece = _invert(sums, uniform)
    cumulative = sums.cumsum(dim=-1, dtype=torch.float64)
    size = sums.gather(1, piece[:, None])[:, 0].double()
    before = cumulative.gather(1, piece[:, None])[:, 0] - size
    inside = ((uniform * cumulative[:, -1] - before) / size).clamp_(0.0, 1.0)
    chosen = pieces[torch.arange(len(pieces), device=piece.device), piece]
    return piece * _PIECE + _invert(chosen, inside)


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative weight exceeds uniform * total; weights [N, M], uniform float64 [N] to 1."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def row_sums(x: torch.Tensor) -> torch.Tensor:
    """Sums of the rows of x [N, V], in an order that does not depend on N.

    A plain sum of one long row is split over threads; the pieces here are too short for that.
    """
    x = F.pad(x, (0, -x.shape[1] % _PIECE))
    return x.view(x.shape[0], -1, _PIECE).sum(dim=-1).sum(dim=-1)


def pick_rows(x: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """These (distinct, rising) rows; without a copy when they are all."""
    return x if len(rows) == len(x) else x[to_device(rows, x)]


def to_device(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return to_device(values, like)[:, None]
