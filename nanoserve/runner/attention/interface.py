"""What the torch backend asks of an attention implementation; the plain torch one is in `attention.paged`."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from nanoserve.runner.backend import ForwardBatch
from nanoserve.runner.kv_cache import PagedKVCache


class PagedAttention(Protocol):
    """Causal attention of a ragged batch over paged keys and values. Keeps nothing between steps."""

    def plan(self, batch: ForwardBatch) -> Any:
        """What follows from the batch alone; made once per step, given back to `attend` for every layer."""
        ...

    def attend(self, plan: Any, layer: int, query: torch.Tensor, cache: PagedKVCache) -> torch.Tensor:
        """query [T, num_heads, head_dim] -> the same shape. The batch's own keys and values are in the cache."""
        ...
