"""Llama and its kin: Llama 1-3.x, SmolLM2, Mistral (with its sliding window), TinyLlama.

h = h + O(attention(rope(QK(norm(h))), V(norm(h))));  h = h + down(silu(gate(norm(h))) * up(norm(h)))
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoserve.runner.models.spec import LayerSpec, ModelSpec, common_fields, read_rope, refuse, required

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
MODEL_TYPES = ("llama", "mistral")


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, hidden_act="silu", attention_bias=False, mlp_bias=False)
    window = int(config.get("sliding_window") or 0)
    layer = LayerSpec(rope=read_rope(config), sliding_window=window)
    return ModelSpec(
        family="llama", layers=(layer,) * int(required(config, "num_hidden_layers")), **common_fields(config)
    )
