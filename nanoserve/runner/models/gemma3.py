"""Gemma 3 (text): norms around both halves of a layer, norms on q and k, sliding and global layers.

    h = h + norm(O(attention(...)));  h = h + norm(down(gelu_tanh(gate(norm(h))) * up(norm(h))))

Embeddings are scaled by sqrt(hidden), RMSNorm weights are stored as w - 1, scores are scaled by
query_pre_attn_scalar**-0.5, and sliding layers have a rotary base of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nanoserve.runner.models.spec import (
    LayerSpec,
    ModelSpec,
    RopeSpec,
    common_fields,
    parse_rope,
    read_layer_types,
    refuse,
    required,
)

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")  # of the latter, the text model
MODEL_TYPES = ("gemma3_text",)


def read_spec(config: Mapping[str, Any]) -> ModelSpec:
    refuse(config, hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False)
    # Defaults of the family, which older checkpoints leave out of config.json.
    fields = common_fields({"head_dim": 256, "tie_word_embeddings": True, "max_position_embeddings": 131072, **config})
    fields["attention_scale"] = float(config.get("query_pre_attn_scalar") or 256) ** -0.5
    return ModelSpec(
        family="gemma3",
        layers=_layers(config),
        qk_norm=True,
        norm_offset=1.0,
        sandwich_norms=True,
        activation="gelu_tanh",
        embedding_scale=math.sqrt(fields["hidden_size"]),
        attention_softcap=float(config.get("attn_logit_softcapping") or 0.0),
        final_softcap=float(config.get("final_logit_softcapping") or 0.0),
        **fields,
    )


def _layers(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Old checkpoints say `sliding_window_pattern` n: each n-th layer is global; newer ones list `layer_types`."""
    num_layers = int(required(config, "num_hidden_layers"))
    pattern = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    kinds = read_layer_types(config, num_layers, "sliding_attention")
    if not config.get("layer_types"):
        kinds = [_kind_of(index, pattern) for index in range(num_layers)]
    window = int(config.get("sliding_window") or 4096)
    ropes = _ropes(config)
    return tuple(
        LayerSpec(rope=ropes[kind], sliding_window=window if kind == "sliding_attention" else 0) for kind in kinds
    )


def _kind_of(index: int, pattern: int) -> str:
    return "full_attention" if (index + 1) % pattern == 0 else "sliding_attention"


def _ropes(config: Mapping[str, Any]) -> dict[str, RopeSpec]:
    """Per kind of layer. `rope_scaling` of old checkpoints applies to the global layers only."""
    parameters = config.get("rope_parameters") or {}
    if "full_attention" in parameters:
        return {kind: parse_rope(parameters[kind]) for kind in ("full_attention", "sliding_attention")}
    scaling = {
        "rope_theta": config.get("rope_theta") or 1_000_000.0,
        **(config.get("rope_scaling") or {}),
        **parameters,
    }
    local = {"rope_theta": config.get("rope_local_base_freq") or 10_000.0}
    return {"full_attention": parse_rope(scaling), "sliding_attention": parse_rope(local)}
