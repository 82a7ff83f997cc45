"""Weights from a model directory: safetensors, one file or sharded, memory-mapped and cast once. Engine process.

Called by `executor`. Checks names and shapes against the spec, so that a truncated or foreign checkpoint ends the
start with one line instead of a wrong answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanoserve.errors import StartupError
from nanoserve.runner.models.spec import ModelSpec

Progress = Callable[[float], None]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Buffers that old checkpoints carry and that follow from config.json.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
_DUMMY_STD = 0.02


def read_config(model_dir: Path) -> dict[str, Any]:
    """The parsed config.json; StartupError when it is missing or not an object."""
    path = model_dir / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise StartupError(f"{path} is not a JSON object")
    return config


def load_weights(model_dir: Path, spec: ModelSpec, dtype: torch.dtype, progress: Progress) -> dict[str, torch.Tensor]:
    """Every tensor of `spec.tensor_shapes()`, on the CPU, in `dtype`. Tensors already in it stay memory-mapped.

    `progress` is called with the share done, 0 to 1. StartupError names the first missing or unexpected tensor.
    """
    shapes = spec.tensor_shapes()
    weights: dict[str, torch.Tensor] = {}
    for path in _files(model_dir):
        for name, tensor in _read_file(path, spec, shapes):
            weights[name] = tensor.to(dtype)
            progress(len(weights) / len(shapes))
    missing = next((name for name in shapes if name not in weights), None)
    if missing is not None:
        raise StartupError(f"{model_dir}: tensor {missing} is missing ({len(weights)} of {len(shapes)} found)")
    return weights


def _files(model_dir: Path) -> list[Path]:
    single, index = model_dir / _SINGLE, model_dir / _INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise StartupError(f"{index} has no weight_map") from error
        return [model_dir / name for name in names]
    if not single.is_file():
        raise StartupError(f"{model_dir} holds neither {_SINGLE} nor {_INDEX}")
    return [single]


def _read_file(path: Path, spec: ModelSpec, shapes: dict[str, tuple[int, ...]]):
    """Yields (name, tensor) of the tensors that the spec asks for; checks the rest."""
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and spec.tie_word_embeddings):
                    continue
                if name not in shapes:
                    raise StartupError(f"{path.name}: unexpected tensor {name} for a {spec.family} model")
                tensor = file.get_tensor(name)
                if tuple(tensor.shape) != shapes[name]:
                    raise StartupError(f"{path.name}: {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
                yield name, tensor
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error


def dummy_weights(spec: ModelSpec, dtype: torch.dtype, seed: int, progress: Progress) -> dict[str, torch.Tensor]:
    """Random weights from the spec alone, the same for the same seed (`--load-format dummy`)."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    shapes = spec.tensor_shapes()
    for name, shape in shapes.items():
        if name.endswith("norm.weight"):
            tensor = torch.full(shape, 1.0 - spec.norm_offset)
        elif name.endswith(".bias"):
            tensor = torch.zeros(shape)
        else:
            tensor = torch.empty(shape).normal_(0.0, _DUMMY_STD, generator=generator)
        weights[name] = tensor.to(dtype)
        progress(len(weights) / len(shapes))
    return weights
