"""The C ABI of the compiled engine, seen from Python: structs of csrc/model.h and typed functions.

Used by `packing` and `backend`. ctypes releases the interpreter lock during a call, so other threads of the engine
process go on while a step runs.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from pathlib import Path

from nanoserve.runner.native.build import NativeUnavailable


class Format(IntEnum):
    """How packed weights lie in memory; see csrc/gemm.h."""

    BF16 = 0
    Q8 = 1
    Q4 = 2
    U8 = 3
    U4 = 4


class KvFormat(IntEnum):
    """How keys and values lie in memory; see csrc/kv.h. Named as torch's types are."""

    BFLOAT16 = 0
    INT8 = 1


class BatchFault(IntEnum):
    """What keeps `ns_model_step` from running."""

    MEMORY = -1
    TOKEN = 1
    POSITION = 2
    BLOCK = 3


class SourceType(IntEnum):
    """What `ns_pack` reads: bf16 or fp32 rows, or GGUF blocks by their type number."""

    BF16 = 0
    FP32 = 1
    GGUF_Q4_0 = 2
    GGUF_Q4_1 = 3
    GGUF_Q8_0 = 8


class Config(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab")),
        *((name, c_int32) for name in ("gelu", "post_norms", "threads", "page_factor", "kv_format")),
        *((name, c_float) for name in ("norm_eps", "embed_scale", "attention_scale")),
    ]


class Linear(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("n", "k", "format", "few_format")),
        ("panels", c_void_p),
        ("few_panels", c_void_p),
        ("bias", c_void_p),
    ]


class Layer(Structure):
    _fields_ = [
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "rope_cos", "rope_sin")),
        ("window", c_int32),
        ("reserved", c_int32),
    ]


class Batch(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("tokens", "rows", "max_blocks", "logit_rows", "logit_stride")),
        *((name, c_int32) for name in ("max_positions", "highest_block")),
        *((name, c_void_p) for name in ("token_ids", "positions", "row_starts", "block_tables", "logit_tokens")),
    ]


class Draw(Structure):
    _fields_ = [
        *((name, c_int32) for name in ("num_rows", "vocab", "logit_stride")),
        *((name, c_void_p) for name in ("rows", "logits", "token_ids")),
    ]


_SIGNATURES = {
    "ns_model_new": (c_void_p, [POINTER(Config), c_void_p, POINTER(Linear), c_void_p]),
    "ns_model_set_layer": (None, [c_void_p, c_int32, POINTER(Layer)]),
    "ns_model_set_kv": (None, [c_void_p, c_void_p, c_int64]),
    "ns_model_step": (c_int32, [c_void_p, POINTER(Batch), c_void_p, c_void_p, POINTER(Draw)]),
    "ns_model_draw": (c_int32, [c_void_p, POINTER(Draw)]),
    "ns_model_slow_thread": (None, [c_void_p, c_int32, c_int32]),
    "ns_model_free": (None, [c_void_p]),
    "ns_packed_bytes": (c_int64, [c_int32, c_int32, c_int32]),
    "ns_pack": (None, [c_void_p, c_int32, c_void_p, *[c_int32] * 5]),
    "ns_matmul": (None, [POINTER(Linear), c_void_p, c_int32, c_void_p, c_int32]),
    "ns_read_bandwidth": (c_double, [c_void_p, c_int64, c_int32]),
}


def load_library(path: Path) -> ctypes.CDLL:
    """The library with its functions typed; NativeUnavailable when the loader refuses it."""
    try:
        library = ctypes.CDLL(str(path))
    except OSError as exc:
        raise NativeUnavailable(f"{path.name} cannot be loaded: {exc}") from exc
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
