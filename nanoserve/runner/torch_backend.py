"""The plain torch backend: the oracle that faster backends are tested against, and the fallback on any device.

Batch invariance on a CPU: the matrix product of a row must not depend on how many rows there are. For a remainder
of fewer than 4 rows in a thread MKL takes kernels that add in another order, so batches are padded to a multiple of
a number of rows, which is found at start by trying: `_stable_row_unit`. Everything else in the path works row by
row in a fixed order.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from nanoserve.runner.attention.interface import PagedAttention
from nanoserve.runner.attention.paged import TorchPagedAttention
from nanoserve.runner.backend import ForwardBatch, Int32
from nanoserve.runner.decoder import Decoder, Weights
from nanoserve.runner.kv_cache import PagedKVCache, bytes_per_block
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.sampler import SampleRows, choose

_ROW_UNITS = (8, 16, 32, 64)
_PROBED_ROWS = 512


class TorchBackend:
    """`ForwardBackend` in plain torch. Empties `weights` while it takes them over; `kv_dtype` is `dtype` by default."""

    name = "torch"

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self._spec = spec
        self._block_size = block_size
        self._kv_dtype = kv_dtype or dtype
        self._device = device
        self._decoder = Decoder(spec, weights, dtype, device)
        unit = _stable_row_unit(self._decoder.matrices()) if device.type == "cpu" else 0
        self.batch_invariant = unit > 0
        self._row_unit = max(1, unit)
        self._cache: PagedKVCache | None = None
        self._attention: PagedAttention | None = None

    @property
    def weights_bytes(self) -> int:
        return self._decoder.weights_bytes

    def close(self) -> None:
        self._cache = self._attention = None

    def kv_bytes_per_block(self) -> int:
        return bytes_per_block(self._spec, self._block_size, self._kv_dtype)

    def allocate_kv(self, num_blocks: int) -> None:
        self._cache = PagedKVCache(self._spec, num_blocks, self._block_size, self._kv_dtype, self._device)
        self._attention = TorchPagedAttention(
            self._spec, self._block_size, self._cache.zero_slot, self._row_unit, self._device
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        assert self._cache is not None and self._attention is not None, "allocate_kv comes first"
        with torch.inference_mode():
            return self._forward(batch, self._cache, self._attention)

    def forward_greedy(self, batch: ForwardBatch) -> Int32:
        top, token_ids = self.forward(batch).max(dim=-1)
        greedy: Int32 = torch.where(torch.isfinite(top), token_ids, -1).to(torch.int32).cpu().numpy()
        return greedy

    def forward_drawn(self, batch: ForwardBatch, rows: SampleRows) -> tuple[np.ndarray, torch.Tensor]:
        logits = self.forward(batch)
        with torch.inference_mode():
            return choose(logits, rows), logits

    def choose(self, logits: torch.Tensor, rows: SampleRows) -> np.ndarray:
        return choose(logits, rows)

    def _forward(self, batch: ForwardBatch, cache: PagedKVCache, attention: PagedAttention) -> torch.Tensor:
        num_tokens = len(batch.token_ids)
        plan = attention.plan(batch)
        slots = torch.from_numpy(_slots(batch, self._block_size)).to(self._device)

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            cache.write(layer, slots, key[:num_tokens], value[:num_tokens])
            mixed = attention.attend(plan, layer, query[:num_tokens], cache)
            return self._pad(mixed)

        token_ids = self._pad(torch.from_numpy(batch.token_ids.astype(np.int64)).to(self._device))
        positions = self._pad(torch.from_numpy(batch.positions.astype(np.int64)).to(self._device))
        hidden = self._decoder.hidden(token_ids, positions, attend)
        wanted = torch.from_numpy(batch.logit_tokens.astype(np.int64)).to(self._device)
        return self._decoder.logits(self._pad(hidden[wanted]))[: len(wanted)]

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """Appends zero rows up to a multiple of the unit."""
        missing = -x.shape[0] % self._row_unit
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def _slots(batch: ForwardBatch, block_size: int) -> np.ndarray:
    """KV slot of every token of the batch, int64 [T]."""
    counts = np.diff(batch.row_starts)
    rows = np.repeat(np.arange(len(counts)), counts)
    blocks = batch.block_tables[rows, batch.positions // block_size].astype(np.int64)
    return blocks * block_size + batch.positions % block_size


def _stable_row_unit(matrices: list[torch.Tensor]) -> int:
    """The least unit for which a product's rows do not depend on the number of units; 0 when there is none."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        return next((unit for unit in _ROW_UNITS if all(_is_stable(unit, m, generator) for m in matrices)), 0)


def _is_stable(unit: int, matrix: torch.Tensor, generator: torch.Generator) -> bool:
    x = torch.randn(_PROBED_ROWS, matrix.shape[1], generator=generator).to(matrix.dtype)
    matrix = matrix[:4096]  # enough of a large output layer, and keeps the start quick
    reference = F.linear(x, matrix)
    counts = [unit * times for times in (1, 2, 3, 4, 5, 7) if unit * times <= _PROBED_ROWS]
    return all(
        torch.equal(F.linear(x[:count], matrix), reference[:count])
        and torch.equal(F.linear(x[-count:], matrix), reference[-count:])
        for count in counts
    )
