"""Packing, decoding and the matrix product of the C++ engine on odd shapes, against torch and gguf's own code."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from nanoserve.runner.native import build
from nanoserve.runner.native.gguf_blocks import _widen_q5
from nanoserve.runner.native.library import Format, SourceType, load_library
from nanoserve.runner.native.memory import allocate
from tests.runner.native_models import PackedMatrix

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(build.missing_cpu_features()), reason="the CPU lacks what the engine needs"),
]

_GGUF = {
    SourceType.GGUF_Q4_0: (GGMLQuantizationType.Q4_0, Format.Q4),
    SourceType.GGUF_Q4_1: (GGMLQuantizationType.Q4_1, Format.Q4),
    SourceType.GGUF_Q8_0: (GGMLQuantizationType.Q8_0, Format.Q8),
}


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load_library(build.library_path(build.default_cache_dir()))


def _pack_bf16(library: ctypes.CDLL, weights: torch.Tensor) -> PackedMatrix:
    source = weights.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
    return PackedMatrix(library, source, SourceType.BF16, Format.BF16, *weights.shape)


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "k"), [(32, 32), (1, 64), (33, 32), (95, 160), (320, 96), (64, 1056)])
def test_product_equals_float32_to_rounding(library: ctypes.CDLL, n: int, k: int) -> None:
    """Operands are the same bf16 numbers; only the order of float32 additions differs from torch's."""
    weights, x = _random(n, k).to(torch.bfloat16), _random(1100, k, seed=1).to(torch.bfloat16)
    exact = x.double() @ weights.double().T
    packed = _pack_bf16(library, weights)
    whole = packed.times(x)
    assert (whole - exact).abs().max() < 2e-6 * k
    for rows in (1, 2, 5, 11, 12, 13, 23, 25, 36, 37, 600):
        assert torch.equal(packed.times(x[:rows]), whole[:rows])
        assert torch.equal(packed.times(x[-rows:].contiguous(), threads=3), whole[-rows:])


@pytest.mark.parametrize("kind", _GGUF)
@pytest.mark.parametrize(("n", "k"), [(32, 32), (45, 96), (128, 256)])
def test_gguf_blocks_multiply_like_their_bf16_values(library: ctypes.CDLL, kind: SourceType, n: int, k: int) -> None:
    """Bit for bit: the blocks are decoded exactly and rounded once."""
    qtype, form = _GGUF[kind]
    rows = quantize((_random(n, k) * 0.1).numpy(), qtype)
    values = torch.from_numpy(dequantize(rows, qtype))
    x = _random(37, k, seed=2).to(torch.bfloat16)
    expected = _pack_bf16(library, values).times(x)
    packed = PackedMatrix(library, np.ascontiguousarray(rows), kind, form, n, k)
    for count in (1, 3, 37):
        assert torch.equal(packed.times(x[:count]), expected[:count])


def test_q5_blocks_widened_to_bytes_are_the_same_weights() -> None:
    rows = quantize((_random(7, 96) * 0.1).numpy(), GGMLQuantizationType.Q5_0)
    widened = _widen_q5(rows)
    assert np.array_equal(dequantize(widened, GGMLQuantizationType.Q8_0), dequantize(rows, GGMLQuantizationType.Q5_0))


def test_int8_error_is_that_of_127_steps(library: ctypes.CDLL) -> None:
    """The diagonal of the product with the identity gives the weights back: at most half a step off, plus the
    rounding of the step to fp16 and of the weight to bf16. A row of zeros stays zeros."""
    weights = _random(64, 64) * 0.1
    weights[5] = 0
    packed = PackedMatrix(library, weights.numpy(), SourceType.FP32, Format.Q8, 64, 64)
    back = packed.times(torch.eye(64).to(torch.bfloat16)).T
    step = weights.view(64, 2, 32).abs().amax(2).repeat_interleave(32, 1) / 127
    assert ((back - weights).abs() <= 0.51 * step + weights.abs() / 256).all()
    assert (back[5] == 0).all()


def test_not_a_number_stays_in_its_row(library: ctypes.CDLL) -> None:
    x = _random(30, 64).to(torch.bfloat16)
    x[4, 3] = float("nan")
    y = _pack_bf16(library, _random(40, 64)).times(x)
    assert y[4].isnan().all() and y[[i for i in range(30) if i != 4]].isfinite().all()


def test_bandwidth_probe_reads_all_of_it(library: ctypes.CDLL) -> None:
    memory = allocate(64 << 20)
    memory[:] = 1
    assert 0.5 < library.ns_read_bandwidth(memory.ctypes.data, memory.size, 2) < 5000
