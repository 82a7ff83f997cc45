"""Tiny GGUF files, written by the `gguf` package, for tests of the converter."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_LEAVES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA_LEAVES = _LEAVES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass
class Vocabulary:
    """Tokenizer metadata of a GGUF, by its keys without `tokenizer.ggml.`."""

    model: str = "gpt2"
    pre: str | None = "gpt-2"
    tokens: list[str] = field(default_factory=list)
    types: list[int] | None = None
    merges: list[str] | None = None
    scores: list[float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # whole keys
    ids: dict[str, int] = field(default_factory=dict)  # bos, eos, eot, ...


def byte_vocabulary(specials: list[str] | None = None, merges: list[str] | None = None, **kwargs: Any) -> Vocabulary:
    """All 256 byte letters, the merges' results, then special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    results = [merge.replace(" ", "") for merge in merges or []]
    tokens = [*letters, *results, *(specials or [])]
    types = [NORMAL] * (len(letters) + len(results)) + [CONTROL] * len(specials or [])
    return Vocabulary(tokens=tokens, types=types, merges=merges or [], **kwargs)


def hf_tensors(family: str, *, layers: int = 2, vocab: int = 300, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Random float32 weights of a tiny model under Hugging Face names: hidden 32, 4 heads of 8, 2 KV heads, MLP 48."""
    draw = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, 32), "model.norm.weight": (32,)}
    for index in range(layers):
        layer = {
            "input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,),
            "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32),
            "self_attn.v_proj.weight": (16, 32), "self_attn.o_proj.weight": (32, 32),
            "mlp.gate_proj.weight": (48, 32), "mlp.up_proj.weight": (48, 32), "mlp.down_proj.weight": (32, 48),
        }  # fmt: skip
        if family == "qwen2":
            layer |= {"self_attn.q_proj.bias": (32,), "self_attn.k_proj.bias": (16,), "self_attn.v_proj.bias": (16,)}
        if family in ("qwen3", "gemma3"):
            layer |= {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
        if family == "gemma3":
            layer |= {"pre_feedforward_layernorm.weight": (32,), "post_feedforward_layernorm.weight": (32,)}
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def metadata_of(family: str, *, layers: int = 2) -> dict[str, Any]:
    """Architecture keys that fit `hf_tensors`."""
    values: dict[str, Any] = {
        "block_count": layers, "context_length": 512, "embedding_length": 32, "feed_forward_length": 48,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 8,
        "attention.value_length": 8, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0,
    }  # fmt: skip
    if family == "gemma3":
        values["attention.sliding_window"] = 64
    return {f"{family}.{key}": value for key, value in values.items()}


def gguf_tensor(
    family: str, name: str, value: np.ndarray[Any, Any], heads: int = 4, kv_heads: int = 2
) -> tuple[str, Any]:
    """One Hugging Face tensor as llama.cpp's converter stores it: renamed, rotary rows interleaved, norms plus one."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    base, _, kind = name.rpartition(".")
    if base in top:
        new = top[base]
    else:
        _, _, layer, leaf = base.split(".", 3)
        new = f"blk.{layer}.{(_GEMMA_LEAVES if family == 'gemma3' else _LEAVES)[leaf]}"
    if family == "llama" and new.endswith(("attn_q", "attn_k")):
        count = heads if new.endswith("attn_q") else kv_heads
        value = value.reshape(count, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if family == "gemma3" and base.endswith("norm"):
        value = value + np.float32(1)
    return f"{new}.{kind}", value


def write_gguf(
    path: Path,
    family: str = "llama",
    *,
    tensors: dict[str, np.ndarray[Any, Any]] | None = None,
    metadata: dict[str, Any] | None = None,
    vocabulary: Vocabulary | None = None,
    quantize: gguf.GGMLQuantizationType | None = None,
    raw_tensors: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Writes a GGUF. `tensors` have Hugging Face names; `raw_tensors` go in as they are named. `metadata` is added
    to (and wins over) `metadata_of(family)`; a value of None removes its key. Matrices are stored in the type
    `quantize` where one is given."""
    tensors = hf_tensors(family) if tensors is None else tensors
    vocabulary = byte_vocabulary(["<s>", "</s>"], ids={"bos": 256, "eos": 257}) if vocabulary is None else vocabulary
    writer = gguf.GGUFWriter(path, family)
    for key, value in (metadata_of(family) | (metadata or {}) | _tokenizer_fields(vocabulary)).items():
        if value is not None:
            _add(writer, key, value)
    for name, value in tensors.items():
        new, stored = gguf_tensor(family, name, value)
        if quantize is not None and stored.ndim == 2:
            packed = gguf.quants.quantize(stored, quantize)
            writer.add_tensor(new, packed, raw_dtype=quantize)
        else:
            writer.add_tensor(new, stored)
    for name, value in (raw_tensors or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tokenizer_fields(vocabulary: Vocabulary) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": vocabulary.model, "pre": vocabulary.pre, "tokens": vocabulary.tokens,
        "token_type": vocabulary.types, "merges": vocabulary.merges, "scores": vocabulary.scores,
    }  # fmt: skip
    fields |= {f"{name}_token_id": value for name, value in vocabulary.ids.items()}
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items() if value not in (None, [])}
    return named | vocabulary.extra


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value)
