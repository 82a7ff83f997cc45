"""What a request does to its logits before a token is drawn: penalties, bias, ids masked until min_tokens.

Owner: the engine process; `batch` keeps one `LogitEdits` for each request that asks for any of this, `sampler` applies
those of a step together. Order, as in the reference servers: repetition, frequency and presence penalty, bias, mask.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from copy import copy

import numpy as np
import torch

from nanoserve.sched.plan import NewRequest

_DECISIVE_BIAS = 100.0  # this much forces an id, minus this much bans it, whatever the logits are


class LogitEdits:
    """Counts of one request's ids, as arrays that grow with it, and its bias and mask."""

    __slots__ = (
        "_bad_words",
        "_bias",
        "_counts",
        "_frequency",
        "_ids",
        "_index",
        "_masked",
        "_min_tokens",
        "_presence",
        "_recent",
        "_repetition",
    )

    def __init__(self, request: NewRequest) -> None:
        sampling = request.sampling
        self._repetition = sampling.repetition_penalty
        self._frequency = sampling.frequency_penalty
        self._presence = sampling.presence_penalty
        self._bias = sampling.logit_bias
        self._masked = request.suppressed_until_min_tokens
        self._min_tokens = sampling.min_tokens
        self._bad_words = sampling.bad_words
        keep = max((len(word) for word in sampling.bad_words), default=1) - 1
        output = request.token_ids[request.num_prompt_tokens :]
        self._recent = deque(output, maxlen=keep)  # the last output ids: a bad word may go on from them
        self._ids = np.empty(0, dtype=np.int64)  # distinct ids of prompt and output
        self._counts = np.empty(0, dtype=np.float32)  # of each, in the output
        self._index: dict[int, int] = {}
        if self.counts_ids:
            for token in request.token_ids[: request.num_prompt_tokens]:
                self._position(token)
            for token in output:
                self._count(token)

    @staticmethod
    def needed(request: NewRequest) -> bool:
        sampling = request.sampling
        return bool(
            sampling.repetition_penalty != 1.0
            or sampling.frequency_penalty
            or sampling.presence_penalty
            or sampling.logit_bias
            or sampling.bad_words
            or (request.suppressed_until_min_tokens and sampling.min_tokens)
        )

    @property
    def counts_ids(self) -> bool:
        return self._repetition != 1.0 or bool(self._frequency or self._presence)

    def append(self, token: int) -> None:
        """Takes note of an output token."""
        self._recent.append(token)
        if self.counts_ids:
            self._count(token)

    def after(self, token: int) -> LogitEdits:
        """What this is once the token, which is only a draft, is out; a copy."""
        later = copy(self)
        later._recent, later._index = self._recent.copy(), self._index.copy()
        later._ids, later._counts = self._ids.copy(), self._counts.copy()
        later.append(token)
        return later

    def _count(self, token: int) -> None:
        position = self._position(token)
        self._counts[position] += 1

    def _position(self, token: int) -> int:
        position = self._index.setdefault(token, len(self._index))
        if position >= len(self._ids):
            size = max(64, 2 * len(self._ids))
            self._ids = np.resize(self._ids, size)
            self._counts = np.concatenate((self._counts, np.zeros(size - len(self._counts), dtype=np.float32)))
        self._ids[position] = token
        return position

    def penalties(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Distinct ids, and for each the factor of the repetition penalty and what is subtracted."""
        size = len(self._index)
        counts = self._counts[:size]
        subtracted = self._frequency * counts + self._presence * (counts > 0)
        return self._ids[:size], np.full(size, self._repetition, dtype=np.float32), subtracted.astype(np.float32)

    def masked(self, num_output: int) -> tuple[int, ...]:
        return self._masked if num_output < self._min_tokens else ()

    def banned(self) -> list[int]:
        """Ids that would complete a bad word now."""
        recent = tuple(self._recent)
        return [word[-1] for word in self._bad_words if word[:-1] == recent[max(len(recent) - len(word) + 1, 0) :]]

    @property
    def bias(self) -> dict[int, float]:
        return self._bias


def apply_edits(logits: torch.Tensor, edits: Sequence[LogitEdits], num_output: Sequence[int]) -> None:
    """Edits row i of logits [N, vocab] by edits[i], of a request with num_output[i] output tokens, in place."""
    _apply_penalties(logits, edits)
    for row, (edit, count) in enumerate(zip(edits, num_output, strict=True)):
        masked = edit.masked(count)
        if edit.bias:
            _apply_bias(logits[row], edit.bias, masked)
        if masked:
            logits[row, list(masked)] = float("-inf")
        if banned := edit.banned():
            logits[row, banned] = float("-inf")


def _apply_penalties(logits: torch.Tensor, edits: Sequence[LogitEdits]) -> None:
    """All rows at once. The repetition penalty divides positive logits and multiplies negative ones (Keskar et al.
    2019, arXiv:1909.05858)."""
    rows = [row for row, edit in enumerate(edits) if edit.counts_ids]
    if not rows:
        return
    parts = [edits[row].penalties() for row in rows]
    row_index = torch.from_numpy(np.repeat(rows, [len(ids) for ids, _, _ in parts])).to(logits.device)
    ids, factor, subtracted = (
        torch.from_numpy(np.concatenate([part[column] for part in parts])).to(logits.device) for column in range(3)
    )
    values = logits[row_index, ids]
    logits[row_index, ids] = torch.where(values > 0, values / factor, values * factor) - subtracted


def _apply_bias(row: torch.Tensor, bias: dict[int, float], masked: tuple[int, ...]) -> None:
    ids = list(bias)
    row[ids] += torch.tensor(list(bias.values()), dtype=row.dtype, device=row.device)
    forced = [token for token, value in bias.items() if value >= _DECISIVE_BIAS and token not in masked]
    if forced:
        kept = row[forced]
        row.fill_(float("-inf"))
        row[forced] = kept
    if banned := [token for token, value in bias.items() if value <= -_DECISIVE_BIAS]:
        row[banned] = float("-inf")
