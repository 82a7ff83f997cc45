"""All weights of a model in one block of memory, in the order and form the C++ engine reads.

Used by `backend`; `packed_file` keeps the block on disk. Matrices are cut into panels (csrc/gemm.h), small vectors are
float32, the embedding stays row-major bf16.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from nanoserve.errors import StartupError
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.native.library import Format, SourceType
from nanoserve.runner.native.memory import allocate

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.intp]
Part = TypeVar("Part", Bytes, torch.Tensor)
Progress = Callable[[float], None]

_FEW = "_few"  # suffix of sections that hold a matrix a second time
_GGUF_FORMATS: dict[SourceType | None, Format] = {
    SourceType.GGUF_Q4_0: Format.Q4,
    SourceType.GGUF_Q4_1: Format.Q4,
    SourceType.GGUF_Q8_0: Format.Q8,
}
_INTEGERS = {Format.Q4: Format.U4, Format.Q8: Format.U8, Format.BF16: Format.U8}  # the form for integer arithmetic
ALIGNMENT = 4096


@dataclass(frozen=True, slots=True)
class GgufRows:
    """A matrix as its GGUF file holds it: `data` is [rows, bytes of a row], `kind` its block type."""

    kind: SourceType
    data: Bytes


@dataclass(slots=True)
class Weights:
    """Checkpoint tensors by name, taken out as they are packed; and, for some, their GGUF blocks."""

    tensors: dict[str, torch.Tensor]
    blocks: Mapping[str, GgufRows]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One packed matrix: the checkpoint tensors that are stacked in it.

    `paired`: gate and up are interleaved. `order`: the rows of each tensor in the order they are packed in, or None
    where they stay; empty: all stay.
    """

    names: tuple[str, ...]
    n: int
    k: int
    paired: bool = False
    order: tuple[Rows | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the block of memory. `format` is None for vectors and the embedding."""

    offset: int
    num_bytes: int
    format: Format | None = None


class PackedWeights:
    """The block and where everything lies in it. Addresses stay valid as long as this object lives."""

    def __init__(self, sections: Mapping[str, Section]) -> None:
        self.sections = sections
        self.num_bytes = max(section.offset + section.num_bytes for section in sections.values())
        self.memory = allocate(-(-self.num_bytes // ALIGNMENT) * ALIGNMENT, "weights")

    def address(self, name: str) -> int:
        """Address of a section; 0 (null) for one that the model does not have."""
        section = self.sections.get(name)
        return self.memory.ctypes.data + section.offset if section else 0

    def format(self, name: str) -> int:
        section = self.sections.get(name)
        return int(section.format or 0) if section else 0

    def view(self, name: str) -> Bytes:
        section = self.sections[name]
        return self.memory[section.offset : section.offset + section.num_bytes]


def matrices(spec: ModelSpec) -> dict[str, Matrix]:
    """Every matrix that is packed, by section name."""
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    found: dict[str, Matrix] = {}
    for index in range(spec.num_layers):
        attention, feed = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        qkv = tuple(f"{attention}{name}_proj.weight" for name in "qkv")
        found[f"{index}.qkv"] = Matrix(qkv, spec.q_size + 2 * spec.kv_size, hidden, order=_qkv_order(spec))
        found[f"{index}.output"] = Matrix((f"{attention}o_proj.weight",), hidden, spec.q_size)
        gate_up = (f"{feed}gate_proj.weight", f"{feed}up_proj.weight")
        found[f"{index}.gate_up"] = Matrix(gate_up, 2 * mlp, hidden, paired=True)
        found[f"{index}.down"] = Matrix((f"{feed}down_proj.weight",), hidden, mlp)
    head = "model.embed_tokens.weight" if spec.tie_word_embeddings else "lm_head.weight"
    found["head"] = Matrix((head,), spec.vocab_size, hidden)
    return found


def rotary_order(num_heads: int, head_dim: int) -> Rows:
    """Where the rows of rotated heads come from: 16 of a head's first half, the 16 they are rotated with, and so on."""
    pieces = np.arange(num_heads * head_dim).reshape(num_heads, 2, head_dim // 32, 16)
    return pieces.swapaxes(1, 2).reshape(-1)


def _qkv_order(spec: ModelSpec) -> tuple[Rows | None, ...]:
    return rotary_order(spec.num_heads, spec.head_dim), rotary_order(spec.num_kv_heads, spec.head_dim), None


def vectors(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Norm weights and biases by section name: the checkpoint tensors that are joined in it."""
    found: dict[str, tuple[str, ...]] = {"final_norm": ("model.norm.weight",)}
    for index in range(spec.num_layers):
        prefix = f"model.layers.{index}."
        after = (prefix + "post_attention_layernorm.weight",)
        found[f"{index}.input_norm"] = (prefix + "input_layernorm.weight",)
        # In Gemma "post_attention" is behind the attention; in all others it is the norm before the MLP.
        if spec.sandwich_norms:
            found[f"{index}.post_attention_norm"] = after
            found[f"{index}.mlp_norm"] = (prefix + "pre_feedforward_layernorm.weight",)
            found[f"{index}.post_mlp_norm"] = (prefix + "post_feedforward_layernorm.weight",)
        else:
            found[f"{index}.mlp_norm"] = after
        if spec.qk_norm:
            found[f"{index}.q_norm"] = (prefix + "self_attn.q_norm.weight",)
            found[f"{index}.k_norm"] = (prefix + "self_attn.k_norm.weight",)
        if spec.qkv_bias:
            found[f"{index}.qkv_bias"] = tuple(f"{prefix}self_attn.{name}_proj.bias" for name in "qkv")
    return found


def choose_formats(spec: ModelSpec, quantization: str, kinds: Mapping[str, SourceType]) -> dict[str, Format]:
    """The form of each matrix. `kinds`: block types of the GGUF file's matrices.

    "gguf" keeps those blocks alone; "auto" keeps them beside the bf16 form, under the section's name plus "_few", for
    steps of few rows. Both give the same logits as "none", bit for bit. "int8-dynamic": those blocks, and groups of 8
    bits for the other matrices, to be multiplied with rounded activations.
    """
    formats: dict[str, Format] = {}
    for section, matrix in matrices(spec).items():
        stacked = {kinds.get(name) for name in matrix.names}
        blocks = _GGUF_FORMATS.get(stacked.pop(), Format.BF16) if len(stacked) == 1 else Format.BF16
        formats[section] = {
            "auto": Format.BF16,
            "none": Format.BF16,
            "gguf": blocks,
            "int8": Format.Q8,
            "int8-dynamic": _INTEGERS[blocks],
        }[quantization]
        if quantization == "auto" and blocks != Format.BF16:
            formats[section + _FEW] = blocks
    return formats


def lay_out(library: ctypes.CDLL, spec: ModelSpec, formats: Mapping[str, Format]) -> PackedWeights:
    """The block with its memory reserved; contents come from `pack_weights`."""
    sizes: dict[str, tuple[int, Format | None]] = {"embedding": (2 * spec.vocab_size * spec.hidden_size, None)}
    shapes = spec.tensor_shapes()
    for section, names in vectors(spec).items():
        sizes[section] = (4 * sum(shapes[name][0] for name in names), None)
    shaped = matrices(spec)
    for section, form in formats.items():
        matrix = shaped[section.removesuffix(_FEW)]
        sizes[section] = (int(library.ns_packed_bytes(form, matrix.n, matrix.k)), form)
    sections, offset = {}, 0
    for section, (size, kept) in sizes.items():
        sections[section] = Section(offset, size, kept)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return PackedWeights(sections)


def pack_weights(
    library: ctypes.CDLL, spec: ModelSpec, packed: PackedWeights, weights: Weights, threads: int, progress: Progress
) -> None:
    """Fills the block, emptying `weights` on the way so that the peak stays near one copy."""
    for section, names in vectors(spec).items():
        parts = [weights.tensors.pop(name).float() for name in names]
        if section.endswith("qkv_bias"):
            parts = _reordered(parts, _qkv_order(spec))
        elif section.endswith((".q_norm", ".k_norm")):
            parts = _reordered(parts, (rotary_order(1, spec.head_dim),))
        joined = torch.cat(parts)
        if section.endswith("norm"):
            joined = joined + spec.norm_offset
        packed.view(section).view(np.float32)[:] = joined.numpy()
    embedding = weights.tensors["model.embed_tokens.weight"].to(torch.bfloat16)
    packed.view("embedding").view(np.int16)[:] = embedding.view(torch.int16).reshape(-1).numpy()
    shaped = matrices(spec)
    todo = [name for name, section in packed.sections.items() if section.format is not None]
    for count, section in enumerate(todo, 1):
        matrix, kept = shaped[section.removesuffix(_FEW)], packed.sections[section].format
        source, kind = _source(matrix, kept, weights, keep=section + _FEW in packed.sections)
        # `source` is only borrowed by its address: it must live until the call is over, and does.
        library.ns_pack(
            packed.address(section), kept, source.ctypes.data, kind, matrix.n, matrix.k, matrix.paired, threads
        )
        progress(count / len(todo))


def _reordered(parts: list[Part], order: tuple[Rows | None, ...]) -> list[Part]:
    """Each part with its rows in that order; no order: as they are."""
    every = order or (None,) * len(parts)
    return [part if rows is None else part[rows] for part, rows in zip(parts, every, strict=True)]


def _forms(kind: SourceType) -> tuple[Format, Format]:
    """The two forms that blocks of a type are packed in."""
    return _GGUF_FORMATS[kind], _INTEGERS[_GGUF_FORMATS[kind]]


def _source(
    matrix: Matrix, form: Format | None, weights: Weights, *, keep: bool
) -> tuple[npt.NDArray[np.generic], SourceType]:
    """The stacked rows of a matrix in the form that the packer reads. Tensors are let go unless `keep`."""
    rows = [weights.blocks.get(name) for name in matrix.names]
    blocks = [row for row in rows if row is not None and form in _forms(row.kind)]
    tensors = [weights.tensors[name] if keep else weights.tensors.pop(name) for name in matrix.names]
    if len(blocks) == len(rows):
        if sum(len(block.data) for block in blocks) != matrix.n:
            raise StartupError(f"{matrix.names[0]}: the GGUF file holds another shape")
        parts = _reordered([block.data for block in blocks], matrix.order)
        return np.ascontiguousarray(np.concatenate(parts)), blocks[0].kind
    tensors = _reordered(tensors, matrix.order)
    if form in (Format.Q8, Format.U8):
        return torch.cat([tensor.float() for tensor in tensors]).contiguous().numpy(), SourceType.FP32
    joined = torch.cat([tensor.to(torch.bfloat16) for tensor in tensors]).contiguous()
    return joined.view(torch.int16).numpy(), SourceType.BF16
