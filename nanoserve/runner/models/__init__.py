"""The supported model families, one file each, found by `architectures` or `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanoserve.errors import StartupError
from nanoserve.runner.models import gemma3, llama, qwen2, qwen3
from nanoserve.runner.models.spec import ModelSpec

_FAMILIES = (llama, qwen2, qwen3, gemma3)


def supported_architectures() -> list[str]:
    return [name for family in _FAMILIES for name in family.ARCHITECTURES]


def read_model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed config.json; StartupError for a family that is not supported, naming those that are."""
    architectures = config.get("architectures") or []
    for family in _FAMILIES:
        if any(name in family.ARCHITECTURES for name in architectures):
            return family.read_spec(config)
    if not architectures:
        for family in _FAMILIES:
            if config.get("model_type") in family.MODEL_TYPES:
                return family.read_spec(config)
    named = ", ".join(map(str, architectures)) or f"model_type {config.get('model_type')!r}"
    raise StartupError(
        f"model architecture {named} is not supported; supported: {', '.join(supported_architectures())}"
    )
