"""Products of 8-bit integers (`--quantization int8-dynamic`) against float64, and models computed that way."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from nanoserve.runner.native import build
from nanoserve.runner.native.library import Format, SourceType, load_library
from tests.runner.native_models import (
    IDS,
    PackedMatrix,
    check_broken_row,
    check_company,
    error_of,
    logits_of,
    make_native,
    make_spec,
    make_torch,
)
from tests.runner.tiny import Sequences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(build.missing_cpu_features()), reason="the CPU lacks what the engine needs"),
]
_HOW = {"quantization": "int8-dynamic"}
_GGUF = {
    SourceType.GGUF_Q4_0: (GGMLQuantizationType.Q4_0, Format.U4),
    SourceType.GGUF_Q4_1: (GGMLQuantizationType.Q4_1, Format.U4),
    SourceType.GGUF_Q8_0: (GGMLQuantizationType.Q8_0, Format.U8),
}


def _activations(rows: int, k: int, *, far: int, seed: int = 1) -> torch.Tensor:
    """bfloat16 with `far` values in each row that are fifty times the others."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=generator)
    for row in range(rows):
        x[row, torch.randperm(k, generator=generator)[:far]] *= 50
    return x.to(torch.bfloat16)


def _rounded(x: torch.Tensor) -> np.ndarray:
    """What csrc/quantize.h makes of rows, in float64: far values as they are, the others in steps of their group."""
    wide = x.float().numpy()
    limit = 7 * np.sqrt(np.square(wide).mean(axis=1, keepdims=True, dtype=np.float32))
    far = np.abs(wide) > limit
    groups = np.where(far, np.float32(0), wide).reshape(len(wide), -1, 32)
    top = np.abs(groups).max(axis=2, keepdims=True)
    quants = np.rint(groups * (np.float32(127) / np.maximum(top, np.float32(1e-30))))
    near = (quants.astype(np.float64) * (top / np.float32(127))).reshape(wide.shape)
    return np.where(far, wide, near)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    return load_library(build.library_path(build.default_cache_dir()))


@pytest.mark.parametrize("kind", _GGUF)
@pytest.mark.parametrize(("n", "k", "far"), [(32, 32, 0), (1, 64, 1), (45, 96, 1), (128, 256, 3), (70, 2144, 9)])
def test_blocks_times_rounded_rows(library: ctypes.CDLL, kind: SourceType, n: int, k: int, far: int) -> None:
    """Integers are added exactly, so all that differs from float64 are the float32 additions of the groups; and a row
    gives the same bits beside any others, far values of theirs or not."""
    qtype, form = _GGUF[kind]
    weights = torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.1
    rows = np.ascontiguousarray(quantize(weights.numpy(), qtype))
    x = _activations(40, k, far=far)
    x[7] = 0
    exact = torch.from_numpy(_rounded(x) @ dequantize(rows, qtype).astype(np.float64).T)
    packed = PackedMatrix(library, rows, kind, form, n, k)
    whole = packed.times(x)
    assert ((whole - exact).abs() <= 2e-6 * k * x.abs().max()).all()
    assert (whole - exact).norm() < 1e-6 * exact.norm()
    assert (whole[7] == 0).all()
    for count in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 37):
        assert torch.equal(packed.times(x[:count]), whole[:count])
        assert torch.equal(packed.times(x[-count:].contiguous(), threads=3), whole[-count:])


def test_float_weights_are_rounded_to_127_steps(library: ctypes.CDLL) -> None:
    """The product with the identity, whose ones are exact, gives the weights back: at most half a step off."""
    weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 0.1
    weights[5] = 0
    packed = PackedMatrix(library, weights.numpy(), SourceType.FP32, Format.U8, 64, 64)
    back = packed.times(torch.eye(64).to(torch.bfloat16)).T
    step = weights.view(64, 2, 32).abs().amax(2).repeat_interleave(32, 1) / 127
    assert ((back - weights).abs() <= 0.51 * step + 1e-6).all()
    assert (back[5] == 0).all()


def test_values_far_out_do_not_coarsen_their_group(library: ctypes.CDLL) -> None:
    """One value of 500 among ones: rounded with it, they would all be 0 (a step is 3.9)."""
    weights = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    rows = np.ascontiguousarray(quantize(weights.numpy(), GGMLQuantizationType.Q8_0))
    values = torch.from_numpy(dequantize(rows, GGMLQuantizationType.Q8_0))
    x = torch.ones(1, 64)
    x[0, 40] = 500
    packed = PackedMatrix(library, rows, SourceType.GGUF_Q8_0, Format.U8, 32, 64)
    assert torch.allclose(packed.times(x.to(torch.bfloat16)), x @ values.T, rtol=1e-5, atol=1e-3)


def test_what_is_no_number_stays_in_its_row(library: ctypes.CDLL) -> None:
    """And infinities, and values whose squares overflow or whose reciprocals would."""
    x = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    x[4, 3] = float("nan")
    x[5, 40] = float("inf")
    x[6, 63] = float("-inf")
    x[8] = 1e-38
    x[9] = 1e30
    x[9, 1] = -1e30
    weights = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)) * 0.01
    packed = PackedMatrix(library, weights.numpy(), SourceType.FP32, Format.U8, 40, 64)
    y = packed.times(x.to(torch.bfloat16))
    assert not y[[4, 5, 6]].isfinite().any()
    fine = [i for i in range(30) if i not in (4, 5, 6)]
    assert y[fine].isfinite().all() and (y[8].abs() < 1e-30).all() and (y[9].abs() > 1e27).any()
    assert torch.equal(packed.times(x[fine].to(torch.bfloat16)), y[fine])


@pytest.mark.parametrize("name", ["llama", "mistral-long-window", "qwen2", "qwen3", "gemma3"])
def test_logits_are_near_float32_and_the_same_in_any_chunks_and_company(name: str) -> None:
    """The yardstick is the error of the same weights rounded alone, 7 to 10 % on these random models."""
    spec = make_spec(name)
    exact = logits_of(make_torch(spec, torch.float32), [300])
    weights_alone = error_of(logits_of(make_native(spec, quantization="int8"), [300]), exact)
    backend = make_native(spec, **_HOW)
    whole = logits_of(backend, [560])
    assert 0 < error_of(whole[:300], exact) < 1.6 * weights_alone
    assert torch.equal(logits_of(backend, [1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 48, 100, 37, *[1] * 6, 300]), whole)
    check_company(backend)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_decode_batches_of_every_size_change_no_bit(name: str) -> None:
    """1 to 40 rows: every height of a register tile; up to 4 rows each thread rounds all of them itself."""
    backend = make_native(make_spec(name), **_HOW)
    alone = logits_of(backend, [60])
    for size in (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 25, 40):
        sequences = Sequences(backend, 16, 160, size)
        rows = [sequences.add(IDS[: 20 + i]) for i in range(size)]
        sequences.run([(row, 0, 19 + i) for i, row in enumerate(rows)])
        for i, part in enumerate(sequences.run([(row, 19 + i, 1) for i, row in enumerate(rows)])):
            assert torch.equal(part[0], alone[19 + i])


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_threads_and_a_lost_core_change_no_bit(slow: int) -> None:
    spec = make_spec("llama")
    whole = logits_of(make_native(spec, **_HOW), [330])
    backend = make_native(spec, threads=3, **_HOW)
    backend.slow_thread(slow, 300)
    assert torch.equal(logits_of(backend, [200, *[1] * 60, 3, 5, 62]), whole)


def test_a_broken_row_fails_alone() -> None:
    check_broken_row(make_native(make_spec("llama"), **_HOW))


def test_packed_weights_of_int8_leave_those_of_int8_dynamic_alone(tmp_path: Path) -> None:
    """Its name begins with int8, too."""
    spec = make_spec("llama")
    for quantization in ("int8-dynamic", "int8"):
        make_native(spec, quantization=quantization, cache_dir=tmp_path, fingerprint="f")
    assert len(list(tmp_path.glob("packed-*.bin"))) == 2


@pytest.mark.parametrize("form", [Format.Q8, Format.U8])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 3e38])
def test_broken_weights_do_not_become_numbers(library: ctypes.CDLL, form: Format, broken: float) -> None:
    """Then the start finds out, instead of serving zeros in their place."""
    weights = torch.full((3, 64), 0.5)
    weights[1, 40] = broken
    y = PackedMatrix(library, weights.numpy(), SourceType.FP32, form, 3, 64).times(torch.ones(1, 64).to(torch.bfloat16))
    assert not y[0, 1].isfinite() and y[0, [0, 2]].isfinite().all()
