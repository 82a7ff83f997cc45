"""What a decoder is, as plain numbers: every family's config.json becomes one `ModelSpec`.

Read by the loader (which tensors to expect), by every forward backend (what to compute) and by the executor (how
much memory). No torch: a spec is a description, not a model. Tensor names are those of Hugging Face checkpoints,
which all supported families share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nanoserve.errors import StartupError

ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of one kind of layer; pairs are (i, i + head_dim/2), as in Hugging Face checkpoints."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """Angle per position for each of the head_dim/2 pairs.

        Rounded to float32 where the reference implementation rounds: models are trained with its numbers, and the
        last bit of a frequency is up to 5e-4 radian at position 8,000.
        `llama3` stretches long wavelengths by `factor`, keeps short ones and blends between (Llama 3.1 model card).
        """
        exponents = [float(np.float32(2 * i / head_dim)) for i in range(head_dim // 2)]
        base = [float(np.float32(1) / np.float32(self.theta**exponent)) for exponent in exponents]
        if self.kind == "linear":
            return [frequency / self.factor for frequency in base]
        if self.kind == "llama3":
            return [self._stretch(frequency) for frequency in base]
        return base

    def _stretch(self, base: float) -> float:
        frequency = np.float32(base)
        wavelength = np.float32(2 * math.pi) / frequency
        if wavelength < self.original_max_position / self.high_freq_factor:
            return base
        if wavelength > self.original_max_position / self.low_freq_factor:
            return float(frequency / np.float32(self.factor))
        blend = np.float32(self.original_max_position) / wavelength - np.float32(self.low_freq_factor)
        blend /= np.float32(self.high_freq_factor - self.low_freq_factor)
        return float((np.float32(1) - blend) * frequency / np.float32(self.factor) + blend * frequency)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer. `sliding_window` w: a token sees itself and the w-1 before; 0: all."""

    rope: RopeSpec
    sliding_window: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer of one of the supported families."""

    family: str
    vocab_size: int  # rows of the embedding and of the output layer
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # longest context the model was made for
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    attention_scale: float  # scores are multiplied by it
    tie_word_embeddings: bool = False  # the output layer is the embedding
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before the rotary embedding
    norm_offset: float = 0.0  # RMSNorm multiplies by (offset + weight); 1.0 in Gemma
    sandwich_norms: bool = False  # Gemma: norms also after attention and around the MLP
    activation: str = "silu"  # or "gelu_tanh"
    embedding_scale: float = 1.0
    attention_softcap: float = 0.0  # cap * tanh(score / cap); 0: none
    final_softcap: float = 0.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def kv_values_per_token(self) -> int:
        """Numbers in the KV cache per token, keys and values of all layers."""
        return 2 * self.num_layers * self.kv_size

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor the checkpoint must hold (lm_head only where it is not tied)."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in self._layer_shapes().items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def num_parameters(self) -> int:
        """Numbers in all tensors; an output layer that is the embedding counts once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, mlp = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (self.q_size, hidden),
            "self_attn.k_proj.weight": (self.kv_size, hidden),
            "self_attn.v_proj.weight": (self.kv_size, hidden),
            "self_attn.o_proj.weight": (hidden, self.q_size),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if self.qkv_bias:
            shapes["self_attn.q_proj.bias"] = (self.q_size,)
            shapes["self_attn.k_proj.bias"] = shapes["self_attn.v_proj.bias"] = (self.kv_size,)
        if self.qk_norm:
            shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (self.head_dim,)
        if self.sandwich_norms:
            shapes["pre_feedforward_layernorm.weight"] = shapes["post_feedforward_layernorm.weight"] = (hidden,)
        return shapes


# ---- reading config.json -----------------------------------------------------------------------------------


def required(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key that has no default; StartupError names a missing one."""
    if config.get(key) is None:
        raise StartupError(f"config.json has no {key}")
    return config[key]


def common_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every family spells alike, as keyword arguments of `ModelSpec`."""
    hidden, heads = int(required(config, "hidden_size")), int(required(config, "num_attention_heads"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or hidden // heads)
    if heads % kv_heads or head_dim % 2:
        raise StartupError(f"config.json: {heads} heads, {kv_heads} kv heads, head_dim {head_dim} do not fit")
    return {
        "vocab_size": int(required(config, "vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(required(config, "intermediate_size")),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "max_position": int(config.get("max_position_embeddings") or 2048),
        "rms_norm_eps": float(config.get("rms_norm_eps") or 1e-6),
        "attention_scale": head_dim**-0.5,
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def refuse(config: Mapping[str, Any], **allowed: Any) -> None:
    """StartupError when a switch that this family's code does not implement is on."""
    for key, value in allowed.items():
        if config.get(key) not in (None, value):
            raise StartupError(f"config.json: {key}={config[key]!r} is not supported (only {value!r})")


def read_rope(config: Mapping[str, Any], default_theta: float = 10000.0) -> RopeSpec:
    """The rotary embedding of a model with one kind of layer, in the old spelling or the new one.

    Old: `rope_theta` and `rope_scaling`; new: both in `rope_parameters`.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_theta", config.get("rope_theta") or default_theta)
    return parse_rope(parameters)


def parse_rope(parameters: Mapping[str, Any]) -> RopeSpec:
    """One dict of rotary parameters as checkpoints spell them; StartupError for a scaling that is not known."""
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in ROPE_KINDS:
        raise StartupError(f"rope scaling {kind!r} is not supported (known: {', '.join(ROPE_KINDS)})")
    return RopeSpec(
        theta=float(required(parameters, "rope_theta")),
        kind=kind,
        factor=float(parameters.get("factor") or 1.0),
        low_freq_factor=float(parameters.get("low_freq_factor") or 1.0),
        high_freq_factor=float(parameters.get("high_freq_factor") or 4.0),
        original_max_position=int(parameters.get("original_max_position_embeddings") or 8192),
    )


def read_layer_types(config: Mapping[str, Any], num_layers: int, default: str) -> list[str]:
    """`layer_types` of the config, or `default` for all; StartupError for a kind of layer that is not known."""
    kinds = list(config.get("layer_types") or [default] * num_layers)
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != num_layers:
        raise StartupError(f"config.json: layer_types not supported: {', '.join(unknown) or 'wrong length'}")
    return kinds
