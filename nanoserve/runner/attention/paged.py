"""Plain torch paged attention: the oracle. Runs in the engine process, on any device.

Keys are read in partitions of 256 positions that begin at multiples of 256, one after the other, with a running
softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). A query therefore meets the same numbers in the same order
whatever the batch, the chunking or the block size is, and partitions that it cannot see change nothing, not even
the last bit: this is what makes the path batch invariant where the matrix product is (see `torch_backend`).

Queries of one row that share a key head are folded into the rows of one matrix product: (tokens x group) rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanoserve.runner.backend import ForwardBatch
from nanoserve.runner.kv_cache import PagedKVCache
from nanoserve.runner.models.spec import ModelSpec

PARTITION = 256
_QUERY_TILE = 128  # tokens of one row that are handled together
_GROUP_TOKENS = 256  # tokens of one matrix product; bounds the scores' memory
_LOWEST = -1e30  # a running maximum that is below any score, yet finite: exp(lowest - lowest) must be 1


@dataclass(frozen=True, slots=True)
class _Part:
    """One partition of the keys for the first B rows of a group."""

    slots: torch.Tensor  # [B * PARTITION] KV slots, the zero slot where there is no key
    hidden: torch.Tensor  # [B, 1, M, PARTITION] true where the query does not see the key


@dataclass(frozen=True, slots=True)
class _Group:
    """Tiles with the same number of query tokens, the one with most partitions first."""

    tokens: torch.Tensor  # [B, n] indices into the flat batch
    parts: list[_Part]


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Groups of query tiles per distinct sliding window."""

    groups: dict[int, list[_Group]]


class TorchPagedAttention:
    """`row_unit`: matrix products get a multiple of so many rows (see `torch_backend` on batch invariance)."""

    def __init__(self, spec: ModelSpec, block_size: int, zero_slot: int, row_unit: int, device: torch.device) -> None:
        self._spec = spec
        self._block_size = block_size
        self._zero_slot = zero_slot
        self._row_unit = row_unit
        self._device = device
        self._windows = sorted({layer.sliding_window for layer in spec.layers})

    def plan(self, batch: ForwardBatch) -> PagedPlan:
        tiles = _tiles(batch)
        return PagedPlan({window: list(self._groups(batch, tiles, window)) for window in self._windows})

    def _groups(self, batch: ForwardBatch, tiles: _Tiles, window: int) -> Iterator[_Group]:
        for size in np.unique(tiles.sizes):
            same = np.flatnonzero(tiles.sizes == size)
            step = max(1, _GROUP_TOKENS // int(size))
            for begin in range(0, len(same), step):
                yield self._group(batch, tiles, same[begin : begin + step], int(size), window)

    def _group(self, batch: ForwardBatch, tiles: _Tiles, chosen: np.ndarray, size: int, window: int) -> _Group:
        last = tiles.positions[chosen] + size - 1
        seen_from = np.maximum(tiles.positions[chosen] - window + 1, 0) if window else np.zeros_like(last)
        first_part = seen_from // PARTITION
        num_parts = last // PARTITION - first_part + 1
        order = np.argsort(-num_parts, kind="stable")
        chosen, first_part, num_parts = chosen[order], first_part[order], num_parts[order]
        query = tiles.positions[chosen][:, None] + np.arange(size, dtype=np.int64)  # [B, n]
        tokens = tiles.tokens[chosen][:, None] + np.arange(size, dtype=np.int64)
        tables = batch.block_tables[tiles.rows[chosen]]
        parts = []
        for index in range(int(num_parts[0])):
            active = int(np.count_nonzero(num_parts > index))
            begin = (first_part[:active] + index) * PARTITION
            parts.append(self._part(tables[:active], begin, query[:active], window))
        return _Group(torch.from_numpy(tokens).to(self._device), parts)

    def _part(self, tables: np.ndarray, begin: np.ndarray, query: np.ndarray, window: int) -> _Part:
        key = begin[:, None] + np.arange(PARTITION, dtype=np.int64)  # [B, PARTITION] positions
        block = np.minimum(key // self._block_size, tables.shape[1] - 1)
        slots = np.take_along_axis(tables, block, axis=1).astype(np.int64) * self._block_size + key % self._block_size
        slots = np.where(key <= query[:, -1:], slots, self._zero_slot)
        hidden = key[:, None, :] > query[:, :, None]
        if window:
            hidden |= key[:, None, :] <= query[:, :, None] - window
        group = self._spec.num_heads // self._spec.num_kv_heads
        hidden = np.repeat(hidden, group, axis=1)
        if short := -hidden.shape[1] % self._row_unit:
            hidden = np.pad(hidden, ((0, 0), (0, short), (0, 0)), constant_values=True)
        return _Part(
            torch.from_numpy(slots.reshape(-1)).to(self._device), torch.from_numpy(hidden[:, None]).to(self._device)
        )

    def attend(self, plan: PagedPlan, layer: int, query: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """query [T, num_heads, head_dim] -> the same shape."""
        out = torch.zeros_like(query)
        for group in plan.groups[self._spec.layers[layer].sliding_window]:
            out[group.tokens] = self._attend_group(group, layer, query[group.tokens], cache).to(out.dtype)
        return out

    def _attend_group(self, group: _Group, layer: int, query: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """query [B, n, num_heads, head_dim] -> float32 of the same shape; all arithmetic is in float32."""
        rows, num_tokens, num_heads, head_dim = query.shape
        kv_heads = self._spec.num_kv_heads
        folded = query.view(rows, num_tokens, kv_heads, num_heads // kv_heads, head_dim).transpose(1, 2)
        folded = folded.reshape(rows, kv_heads, -1, head_dim).float() * self._spec.attention_scale
        num_rows = folded.shape[2]
        folded = F.pad(folded, (0, 0, 0, -num_rows % self._row_unit))
        top = folded.new_full((rows, kv_heads, folded.shape[2], 1), _LOWEST)
        total = torch.zeros_like(top)
        mixed = torch.zeros_like(folded)
        for part in group.parts:
            active = part.hidden.shape[0]
            shape = (active, PARTITION, kv_heads, head_dim)
            key, value = cache.read(layer, part.slots)
            scores = torch.matmul(folded[:active], key.view(shape).permute(0, 2, 3, 1))
            if self._spec.attention_softcap:
                scores = torch.tanh(scores / self._spec.attention_softcap) * self._spec.attention_softcap
            scores = scores.masked_fill_(part.hidden, float("-inf"))
            new_top = torch.maximum(top[:active], scores.amax(dim=-1, keepdim=True))
            weights = scores.sub_(new_top).exp_()
            decay = torch.exp(top[:active] - new_top)
            total[:active] = total[:active] * decay + weights.sum(dim=-1, keepdim=True)
            mixed[:active] = mixed[:active] * decay + torch.matmul(weights, value.view(shape).transpose(1, 2))
            top[:active] = new_top
        result = (mixed / total)[:, :, :num_rows]
        unfolded = result.reshape(rows, kv_heads, num_tokens, num_heads // kv_heads, head_dim)
        return unfolded.transpose(1, 2).reshape(rows, num_tokens, num_heads, head_dim)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Rows cut into pieces of at most _QUERY_TILE tokens; all columns [num_tiles]."""

    rows: np.ndarray
    tokens: np.ndarray  # first flat token
    positions: np.ndarray  # position of that token
    sizes: np.ndarray


def _tiles(batch: ForwardBatch) -> _Tiles:
    starts = batch.row_starts[:-1].astype(np.int64)
    counts = np.diff(batch.row_starts).astype(np.int64)
    num_tiles = -(-counts // _QUERY_TILE)
    rows = np.repeat(np.arange(len(counts)), num_tiles)
    index = np.arange(len(rows)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    skipped = index * _QUERY_TILE
    first_position = batch.context_lens.astype(np.int64) - counts
    return _Tiles(
        rows=rows,
        tokens=starts[rows] + skipped,
        positions=first_position[rows] + skipped,
        sizes=np.minimum(counts[rows] - skipped, _QUERY_TILE),
    )
