"""Weights of a GGUF file as one model.safetensors with Hugging Face names, written tensor by tensor.

Used by the converter only; numpy and the `gguf` package's dequantizers, no torch. Quantized blocks become float32,
which holds every value exactly; float32, float16 and bfloat16 tensors keep their bits. So the weights are rounded
once at most, to the compute type, when they are loaded.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from nanoserve.errors import StartupError
from nanoserve.hub.gguf_file import GgufFile, TensorInfo

ROPE_FACTORS = "rope_freqs.weight"  # becomes part of config.json, not a weight

_Bytes = npt.NDArray[np.uint8]
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NATIVE = {
    GGMLQuantizationType.F32: ("F32", 4),
    GGMLQuantizationType.F16: ("F16", 2),
    GGMLQuantizationType.BF16: ("BF16", 2),
}
_CHUNK_BYTES = 32 << 20  # of float32 values at a time: bounds the memory of a conversion


@dataclass(frozen=True, slots=True)
class _Plan:
    """How one tensor goes over: its new name and type, whether rows move, what is subtracted."""

    info: TensorInfo
    name: str
    dtype: str
    num_bytes: int
    permuted_heads: int = 0  # undo llama.cpp's interleaving of rotary pairs over this many heads; 0: rows stay
    offset: float = 0.0  # subtracted: Gemma's norms are stored as w + 1


def read_rope_factors(file: GgufFile) -> list[float] | None:
    """The divisors of the rotary frequencies (Llama 3), None where the file has none."""
    info = file.tensors.get(ROPE_FACTORS)
    if info is None:
        return None
    if info.ggml_type != GGMLQuantizationType.F32:
        raise StartupError(f"{file.name}: {ROPE_FACTORS} must be float32")
    return [float(value) for value in np.frombuffer(file.read(info.offset, 4 * math.prod(info.shape)), np.float32)]


def write_safetensors(file: GgufFile, config: dict[str, Any], target: Path, progress: Callable[[float], None]) -> None:
    """Writes all weights to `target`; `progress` gets the done part, 0..1.

    `config` is what `gguf_config.build_config` made of the same file. Holds a few chunks in memory, not
    whole tensors (but for query and key projections). Raises StartupError for a tensor that is unknown, missing or
    of a type that cannot be dequantized.
    """
    plans = [_plan(file, info, config) for info in file.tensors.values() if info.name != ROPE_FACTORS]
    _check_complete(file, config, {plan.name for plan in plans})
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for plan in plans:
        shape = list(plan.info.shape)
        header[plan.name] = {"dtype": plan.dtype, "shape": shape, "data_offsets": [position, position + plan.num_bytes]}
        position += plan.num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data then starts aligned
    done, total = 0, max(position, 1)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for plan in plans:
            for chunk in _chunks(file, plan):
                out.write(chunk.data)
                done += chunk.nbytes
                progress(done / total)
        out.flush()
        os.fsync(out.fileno())


def weights_num_bytes(file: GgufFile, config: dict[str, Any]) -> int:
    """Size of the weight file that `write_safetensors` would write, to within its header."""
    return sum(_plan(file, info, config).num_bytes for info in file.tensors.values() if info.name != ROPE_FACTORS)


def block_types(file: GgufFile, config: dict[str, Any]) -> dict[str, int]:
    """The ggml type of every weight by its Hugging Face name."""
    infos = [info for info in file.tensors.values() if info.name != ROPE_FACTORS]
    return {_plan(file, info, config).name: info.ggml_type for info in infos}


def read_blocks(file: GgufFile, config: dict[str, Any]) -> Iterator[tuple[str, int, _Bytes]]:
    """Every matrix as stored, still quantized: Hugging Face name, ggml type, bytes [rows, bytes of a row].

    Rows are in Hugging Face order, so a backend with kernels for a block type can take them over as they are.
    """
    for info in file.tensors.values():
        if info.name == ROPE_FACTORS or len(info.shape) != 2:
            continue
        plan = _plan(file, info, config)
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
        row_bytes = info.shape[1] // block * block_bytes
        (rows,) = _raw_chunks(file, plan, info.shape[0], row_bytes, info.shape[0])
        yield plan.name, info.ggml_type, rows


def _plan(file: GgufFile, info: TensorInfo, config: dict[str, Any]) -> _Plan:
    gemma = config["model_type"] == "gemma3_text"
    base, _, kind = info.name.rpartition(".")
    name = _TOP_NAMES.get(base)
    parts = base.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit():
        leaf = (_GEMMA3_LAYER_NAMES if gemma else _LAYER_NAMES).get(parts[2])
        name = leaf and f"model.layers.{int(parts[1])}.{leaf}"
    if name is None or kind not in ("weight", "bias"):
        raise StartupError(f"{file.name}: tensor {info.name[:80]!r} is not part of a {config['model_type']} model")
    try:
        ggml_type = GGMLQuantizationType(info.ggml_type)
    except ValueError:
        raise StartupError(f"{file.name}: tensor type {info.ggml_type} is not known") from None
    block, _ = GGML_QUANT_SIZES[ggml_type]
    if not info.shape or min(info.shape) < 1 or info.shape[-1] % block:
        raise StartupError(f"{file.name}: tensor {info.name[:80]!r} has a shape that does not fit its type")
    dtype, item = _NATIVE.get(ggml_type, ("F32", 4))
    offset = 1.0 if gemma and name.endswith("norm") else 0.0
    if offset:
        dtype, item = "F32", 4
    heads = 0
    if config["model_type"] in ("llama", "mistral"):
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(parts[-1], 0)
    return _Plan(info, f"{name}.{kind}", dtype, math.prod(info.shape) * item, heads, offset)


def _check_complete(file: GgufFile, config: dict[str, Any], names: set[str]) -> None:
    """Each layer has the same tensors; a file cut short by a faulty writer is found here, not at load."""
    layers = config["num_hidden_layers"]
    per_layer = {name.split(".", 3)[3] for name in names if name.startswith("model.layers.")}
    expected = {f"model.layers.{index}.{leaf}" for index in range(layers) for leaf in per_layer}
    expected |= {"model.embed_tokens.weight", "model.norm.weight"}
    missing = sorted(expected - names) or ([] if per_layer else ["all layers"])
    if missing:
        raise StartupError(f"{file.name}: {len(missing)} tensors are missing, among them {missing[0]}")
    extra = [name for name in names if name.startswith("model.layers.") and int(name.split(".")[2]) >= layers]
    if extra:
        raise StartupError(f"{file.name}: {min(extra)} lies past the last of {layers} layers")


def _chunks(file: GgufFile, plan: _Plan) -> Iterator[npt.NDArray[Any]]:
    """The values of one tensor in order, as contiguous arrays of the type they are stored in."""
    info = plan.info
    ggml_type = GGMLQuantizationType(info.ggml_type)
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    columns = info.shape[-1]
    if plan.permuted_heads and len(info.shape) == 1:
        columns = 1  # a bias has one value per row of its weight
    rows = math.prod(info.shape) // columns
    row_bytes = columns // block * block_bytes
    step = max(1, _CHUNK_BYTES // (4 * columns))
    for raw in _raw_chunks(file, plan, rows, row_bytes, step):
        if ggml_type in _NATIVE and plan.dtype == _NATIVE[ggml_type][0] and not plan.offset:
            yield raw
            continue
        try:
            with np.errstate(invalid="ignore", over="ignore"):  # a NaN in the file is the file's; loading finds it
                values = dequantize(raw, ggml_type)
                values = values - np.float32(plan.offset) if plan.offset else values
        except NotImplementedError:
            raise StartupError(f"{file.name}: tensors of type {ggml_type.name} are not supported") from None
        yield np.ascontiguousarray(values)


def _raw_chunks(file: GgufFile, plan: _Plan, rows: int, row_bytes: int, step: int) -> Iterator[_Bytes]:
    """The tensor's bytes as stored, [up to `step`, row_bytes] each, in the order of the new rows."""
    if plan.permuted_heads:  # needs all rows at once; these tensors are the small ones
        whole = np.frombuffer(file.read(plan.info.offset, rows * row_bytes), np.uint8).reshape(rows, row_bytes)
        whole = _unpermute_rows(whole, plan.permuted_heads, file.name)
        for start in range(0, rows, step):
            yield np.ascontiguousarray(whole[start : start + step])
        return
    for start in range(0, rows, step):
        count = min(step, rows - start)
        data = file.read(plan.info.offset + start * row_bytes, count * row_bytes)
        yield np.frombuffer(data, np.uint8).reshape(count, row_bytes)


def _unpermute_rows(raw: _Bytes, heads: int, name: str) -> _Bytes:
    """Rows of a query or key projection back in Hugging Face order.

    llama.cpp keeps the two halves of a rotary pair in neighbouring rows, (0, d/2, 1, d/2 + 1, ...) within a head;
    here they are half a head apart. Rows are moved while still quantized: blocks never span rows.
    """
    rows, row_bytes = raw.shape
    if rows % (2 * heads):
        raise StartupError(f"{name}: {rows} projection rows do not fit {heads} heads")
    return raw.reshape(heads, rows // heads // 2, 2, row_bytes).swapaxes(1, 2).reshape(rows, row_bytes)
