"""KV memory: its layout, its size in bytes, and how many blocks to make. Owner: the engine process.

A slot holds the key and the value of one token in one layer; block b is slots b*block_size .. (b+1)*block_size-1.
As int8 a slot also holds one float32 scale per head for the key and one for the value: the largest magnitude / 127.
One slot past the last block is never written and stays zero: padding reads it, so that whatever another request
left behind (a NaN, say) cannot reach a row through a masked weight of 0 (0 * NaN is NaN).
"""

from __future__ import annotations

import math

import torch

from nanoserve.config import CacheConfig, SchedulerConfig
from nanoserve.errors import ConfigError
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.native.memory import allocate

_FREE_SHARE = 0.25  # of the free memory, when the operator names no size
_LEVELS = 127  # of int8, in each direction
_LEAST = 1e-30  # a head without a larger number is stored as zeros: its scale would have no reciprocal


def choose_kv_dtype(name: str, compute: torch.dtype) -> torch.dtype:
    """The type of keys and values for `--kv-cache-dtype`; auto: the one that is computed in."""
    return {"auto": compute, "bfloat16": torch.bfloat16, "int8": torch.int8}[name]


class PagedKVCache:
    """Keys and values of all layers, [num_layers, num_slots + 1, num_kv_heads, head_dim] each; int8 with scales."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.zero_slot = num_blocks * block_size
        shape = (spec.num_layers, self.zero_slot + 1, spec.num_kv_heads, spec.head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)
        scales = shape[:3] if dtype == torch.int8 else (0,)
        self.key_scales = _zeros(scales, torch.float32, device)
        self.value_scales = _zeros(scales, torch.float32, device)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [T, num_kv_heads, head_dim] of one layer at int64 slots [T]."""
        if self.keys.dtype == torch.int8:
            key, scales = _quantize(key)
            self.key_scales[layer].index_copy_(0, slots, scales)
            value, scales = _quantize(value)
            self.value_scales[layer].index_copy_(0, slots, scales)
        self.keys[layer].index_copy_(0, slots, key.to(self.keys.dtype))
        self.values[layer].index_copy_(0, slots, value.to(self.values.dtype))

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer at int64 slots [N], float32 [N, num_kv_heads, head_dim] each."""
        key, value = self.keys[layer][slots].float(), self.values[layer][slots].float()
        if self.keys.dtype == torch.int8:
            key *= self.key_scales[layer][slots][..., None]
            value *= self.value_scales[layer][slots][..., None]
        return key, value


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU pages become real when they are touched; torch.zeros would write them all, gigabytes at the start."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = allocate(math.prod(shape) * dtype.itemsize, "kv cache")
    return torch.from_numpy(memory).view(dtype).view(shape)


def _quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, heads, head_dim] -> whole numbers -127..127 as float32, and float32 scales [T, heads]."""
    x = x.float()
    top = x.abs().amax(dim=-1)
    steps = torch.where(top > _LEAST, _LEVELS / top, 0.0)
    return (x * steps[..., None]).round_().clamp_(-_LEVELS, _LEVELS), torch.where(top > _LEAST, top / _LEVELS, 0.0)


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    """`dtype` is that of keys and values; int8 brings its scales along."""
    scales = 2 * spec.num_layers * spec.num_kv_heads * torch.float32.itemsize if dtype == torch.int8 else 0
    return (spec.kv_values_per_token() * int(dtype.itemsize) + scales) * block_size


def choose_num_blocks(
    cache: CacheConfig, scheduler: SchedulerConfig, *, block_bytes: int, max_model_len: int, free_bytes: int
) -> int:
    """Blocks to allocate: as told, or a quarter of the free memory but no more than the limits can ever use.

    ConfigError when not even one block fits.
    """
    if cache.num_kv_blocks:
        return cache.num_kv_blocks
    if cache.kv_cache_memory:
        num_blocks = cache.kv_cache_memory // block_bytes
    else:
        usable = scheduler.max_num_seqs * -(-max_model_len // cache.block_size)
        num_blocks = min(int(free_bytes * _FREE_SHARE) // block_bytes, usable)
    if num_blocks < 1:
        raise ConfigError(f"--kv-cache-memory: one block of {cache.block_size} tokens needs {block_bytes} bytes")
    return int(num_blocks)
