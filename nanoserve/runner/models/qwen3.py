"""Qwen3 (dense): Llama's layer with an RMSNorm over each head of q and k before the rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoserve.runner.models.qwen2 import read_layers
from nanoserve.runner.models.spec import ModelSpec, common_fields, refuse

ARCHITECTURES = ("Qwen3ForCausalLM",)
MODEL_TYPES = ("qwen3",)


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, hidden_act="silu", attention_bias=False)
    return ModelSpec(family="qwen3", qk_norm=True, layers=read_layers(config), **common_fields(config))
