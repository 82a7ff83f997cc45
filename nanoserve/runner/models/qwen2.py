"""Qwen2 and Qwen2.5: Llama's layer with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoserve.runner.models.spec import (
    LayerSpec,
    ModelSpec,
    common_fields,
    read_layer_types,
    read_rope,
    refuse,
    required,
)

ARCHITECTURES = ("Qwen2ForCausalLM",)
MODEL_TYPES = ("qwen2",)


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, hidden_act="silu")
    return ModelSpec(family="qwen2", qkv_bias=True, layers=read_layers(config), **common_fields(config))


def read_layers(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Layers from `max_window_layers` on slide, if `use_sliding_window` is set at all (no released model sets it)."""
    num_layers = int(required(config, "num_hidden_layers"))
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    kinds = read_layer_types(config, num_layers, "full_attention")
    if window and not config.get("layer_types"):
        first = int(required(config, "max_window_layers"))
        kinds = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    rope = read_rope(config)
    return tuple(LayerSpec(rope=rope, sliding_window=window if k == "sliding_attention" else 0) for k in kinds)
