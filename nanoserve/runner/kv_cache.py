"""KV memory: its layout, its size in bytes, and how many blocks to make. Owner: the engine process.

A slot holds the key and the value of one token in one layer; block b is slots b*block_size .. (b+1)*block_size-1.
One slot past the last block is never written and stays zero: padding reads it, so that whatever another request
left behind (a NaN, say) cannot reach a row through a masked weight of 0 (0 * NaN is NaN).
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from nanoserve.config import CacheConfig, SchedulerConfig
from nanoserve.errors import ConfigError
from nanoserve.obs.memory import claim
from nanoserve.runner.models.spec import ModelSpec

_FREE_SHARE = 0.25  # of the free memory, when the operator names no size
_CGROUP = Path("/sys/fs/cgroup")


class PagedKVCache:
    """Keys and values of all layers, [num_layers, num_slots + 1, num_kv_heads, head_dim] each."""

    def __init__(
        self, spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.zero_slot = num_blocks * block_size
        shape = (spec.num_layers, self.zero_slot + 1, spec.num_kv_heads, spec.head_dim)
        # zeros, not empty: the system hands out zero pages only when they are touched, so this costs nothing.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        if self.keys.device.type == "cpu":
            for tensor in (self.keys, self.values):
                claim("kv cache", tensor.data_ptr(), tensor.nbytes)

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores key and value [T, num_kv_heads, head_dim] of one layer at int64 slots [T]."""
        self.keys[layer].index_copy_(0, slots, key)
        self.values[layer].index_copy_(0, slots, value)


def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
    return spec.kv_values_per_token() * block_size * int(dtype.itemsize)


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


def free_memory(device: torch.device, cgroup: Path = _CGROUP) -> int:
    """Bytes that could still be allocated; on a CPU within the container's limit, where there is one."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = int(psutil.virtual_memory().available)
    try:
        limit = int((cgroup / "memory.max").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # Not memory.current: that counts the page cache too, which the weights' files alone can fill.
        used = int(stat["anon"]) + int(stat["shmem"])
    except (OSError, ValueError, KeyError):  # no cgroup v2, or its limit is "max"
        return free
    return min(free, max(0, limit - used))
