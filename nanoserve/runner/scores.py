"""Log-probabilities of tokens under the raw logits: before penalties, bias and temperature.

Owner: the engine process, called by `model_runner`.
"""

from __future__ import annotations

import numpy as np
import torch

from nanoserve.runner.draw import row_sums
from nanoserve.sched.plan import TokenScores

# 4 MiB: what fits into the caches, and what the allocator keeps instead of mapping fresh pages for every temporary.
# With Gemma's vocabulary, 64 rows at once took five times as long per row as 4.
_VALUES_AT_ONCE = 1 << 20
_SPARE = 8  # candidates beyond those asked for, so that equal values at the edge are taken by rising id
_LOWEST = -9999.0  # what minus infinity is reported as


def score_tokens(logits: torch.Tensor, rows: np.ndarray, token_ids: np.ndarray, num_top: int) -> list[TokenScores]:
    """Scores of token_ids[i] under row rows[i] of logits [S, vocab], with the num_top most likely ids of that row."""
    scores: list[TokenScores] = []
    step = max(1, _VALUES_AT_ONCE // logits.shape[1])
    for begin in range(0, len(rows), step):
        part = slice(begin, begin + step)
        index = torch.from_numpy(rows[part]).to(logits.device)
        tokens = torch.from_numpy(token_ids[part]).to(logits.device)
        scores += _score_rows(logits[index], tokens, num_top)
    return scores


def _score_rows(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> list[TokenScores]:
    top = logits.amax(dim=-1, keepdim=True)
    normalizer = top + row_sums(torch.exp(logits - top)).log()[:, None]
    chosen = logits.gather(1, tokens[:, None])
    ranks = ((logits > chosen).sum(dim=-1) + 1).tolist()
    logprobs = _finite(chosen - normalizer)[:, 0].tolist()
    if not num_top:
        return [TokenScores(logprob, rank, [], []) for logprob, rank in zip(logprobs, ranks, strict=True)]
    values, ids = _top_sorted(logits, min(num_top + _SPARE, logits.shape[1]))
    top_logprobs = _finite(values[:, :num_top] - normalizer).tolist()
    return [TokenScores(*row) for row in zip(logprobs, ranks, ids[:, :num_top].tolist(), top_logprobs, strict=True)]


def _top_sorted(logits: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest of each row and their ids, falling; equal values by rising id."""
    ids = torch.topk(logits, width, dim=-1, sorted=False).indices.sort(dim=-1).values
    values, order = torch.sort(logits.gather(1, ids), dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _finite(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(logprobs, nan=_LOWEST).clamp_(min=_LOWEST)
