"""Keys and values in int8: what is stored, the C++ engine against the torch backend, the same bits in any company."""

from __future__ import annotations

import psutil
import pytest
import torch

from nanoserve.runner.kv_cache import PagedKVCache, bytes_per_block
from nanoserve.runner.native.build import missing_cpu_features
from tests.runner.native_models import (
    CONFIGS,
    IDS,
    check_broken_row,
    check_company,
    error_of,
    logits_of,
    make_native,
    make_spec,
    make_torch,
)
from tests.runner.tiny import Sequences

pytestmark = pytest.mark.slow
needs_cpu = pytest.mark.skipif(bool(missing_cpu_features()), reason="the CPU lacks what the engine needs")


def test_what_is_stored_is_at_most_half_a_step_off() -> None:
    spec = make_spec("llama")
    cache = PagedKVCache(spec, 3, 16, torch.int8, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    key, value = (torch.randn(5, 2, 32, generator=generator) * 10.0 ** (2 * i) for i in range(2))
    key[1] = 0
    value[2, 1, 3] = 1e4  # one large number makes this head's step large, and no other's
    slots = torch.tensor([47, 0, 13, 22, 30])
    cache.write(1, slots, key, value)
    for stored, given in zip(cache.read(1, slots), (key, value), strict=True):
        step = given.abs().amax(-1, keepdim=True) / 127
        assert ((stored - given).abs() <= 0.5001 * step).all()
        assert (stored.abs().amax(-1) == given.abs().amax(-1)).all()  # the largest is exact
    assert cache.keys[0].count_nonzero() == 0 and cache.keys[1].flatten(1).any(1).sum() == 4
    held = sum(t.nbytes for t in (cache.keys, cache.values, cache.key_scales, cache.value_scales))
    assert held == bytes_per_block(spec, 1, torch.int8) * 49


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_new_cache_takes_no_memory_until_it_is_used(dtype: torch.dtype) -> None:
    """By default it is a quarter of the free memory, and at the start most of it is empty."""
    spec = make_spec("llama")
    num_blocks = (1 << 30) // bytes_per_block(spec, 16, dtype)
    before = psutil.Process().memory_info().rss
    cache = PagedKVCache(spec, num_blocks, 16, dtype, torch.device("cpu"))
    key = torch.ones(1, *cache.keys.shape[2:])
    cache.write(0, torch.tensor([num_blocks * 8]), key, key)
    assert psutil.Process().memory_info().rss - before < 64 << 20
    stored, _ = cache.read(0, torch.tensor([num_blocks * 8, cache.zero_slot]))
    assert (stored[0] == 1).all() and (stored[1] == 0).all()


@needs_cpu
@pytest.mark.parametrize("name", CONFIGS)
def test_engine_is_no_further_from_float32_than_torch_in_bfloat16(name: str) -> None:
    """All three over int8 keys and values. The models have 1, 3, 4 and 9 query heads a key head, head sizes 32 to 256,
    windows within and beyond a segment. With another scale, another order or a mistaken sign the error is above 1."""
    spec = make_spec(name)
    exact = logits_of(make_torch(spec, torch.float32, kv_dtype=torch.int8), [300])
    rounded = error_of(logits_of(make_torch(spec, torch.bfloat16, kv_dtype=torch.int8), [300]), exact)
    ours = logits_of(make_native(spec, kv_dtype=torch.int8), [300])
    assert 0 < error_of(ours, exact) <= 1.1 * rounded
    assert not torch.equal(ours, logits_of(make_native(spec), [300]))


@needs_cpu
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 47, 48])
def test_short_contexts(length: int) -> None:
    spec = make_spec("llama")
    exact = logits_of(make_torch(spec, torch.float32, kv_dtype=torch.int8), [length])
    assert error_of(logits_of(make_native(spec, kv_dtype=torch.int8), [length]), exact) < 0.1


@needs_cpu
@pytest.mark.parametrize("name", ["llama", "llama-mha-tied", "llama-mqa-9", "mistral-long-window", "gemma3"])
def test_chunks_and_split_contexts_change_no_bit(name: str) -> None:
    backend = make_native(make_spec(name), kv_dtype=torch.int8)
    whole = logits_of(backend, [1100])
    assert torch.equal(
        logits_of(backend, [1, 2, 3, 5, 12, 13, 16, 48, 100, 57, *[1] * 3, 300, 460, 7, 33, *[1] * 40]), whole
    )


@needs_cpu
def test_wide_blocks_change_no_bit() -> None:
    spec = make_spec("llama")
    whole = logits_of(make_native(spec, kv_dtype=torch.int8), [100])
    wide = make_native(spec, threads=3, block_size=48, num_blocks=40, kv_dtype=torch.int8)
    sequences = Sequences(wide, 48, 40)
    assert torch.equal(sequences.run([(sequences.add(IDS[:100]), 0, 100)])[0], whole)


@needs_cpu
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_company_changes_no_bit(name: str) -> None:
    check_company(make_native(make_spec(name), kv_dtype=torch.int8))


@needs_cpu
def test_a_broken_row_fails_alone() -> None:
    check_broken_row(make_native(make_spec("llama"), kv_dtype=torch.int8))


@needs_cpu
def test_half_the_memory() -> None:
    spec = make_spec("qwen3")
    full, half = make_native(spec), make_native(spec, kv_dtype=torch.int8)
    assert half.kv_bytes_per_block() == bytes_per_block(spec, 16, torch.int8) < 0.54 * full.kv_bytes_per_block()
