"""The supported model families, one file each, found by `architectures` or `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanoserve.errors import StartupError
from nanoserve.runner.models import gemma3, llama, qwen2, qwen3
from nanoserve.runner.models.spec import ModelSpec

_FAMILIES = (llama, qwen2, qwen3, gemma3)


def supported_architectures() -> list[str]:
    return [name for family in _FAMILIES for name in family.ARCHITECTURES]


def read_model_spec(config: Mapping[str, Any]) -> ModelSpec:
    """The spec of a parsed config.json; StartupError for a family that is not supported, naming those that are.

    A multimodal config is expected with its `text_config` already lifted (`hub.model_files`).
    """
    architectures = config.get("architectures") or []
    reader = _reader_by_architecture(architectures) or (
        None if architectures else _reader_by_model_type(config.get("model_type"))
    )
    if reader is None:
        named = ", ".join(map(str, architectures)) or f"model_type {config.get('model_type')!r}"
        known = ", ".join(supported_architectures())
        raise StartupError(f"model architecture {named} is not supported; supported: {known}")
    return reader(config)


def _reader_by_architecture(architectures: list[str]) -> Callable[[Mapping[str, Any]], ModelSpec] | None:
    return next((f.read_spec for f in _FAMILIES if any(name in f.ARCHITECTURES for name in architectures)), None)


def _reader_by_model_type(model_type: str | None) -> Callable[[Mapping[str, Any]], ModelSpec] | None:
    return next((family.read_spec for family in _FAMILIES if model_type in family.MODEL_TYPES), None)
