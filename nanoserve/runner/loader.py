"""Weights from a model's files: safetensors, one or sharded, memory-mapped and cast once. Engine process.

Called by `executor`. Checks names and shapes against the spec, so that a truncated or foreign checkpoint ends the
start with one line instead of a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from nanoserve.errors import StartupError
from nanoserve.runner.models.spec import ModelSpec

Progress = Callable[[float], None]

# Buffers that old checkpoints carry and that follow from config.json.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
# A multimodal checkpoint: its language model is taken out, the rest is left alone.
_LANGUAGE_PREFIXES = (("language_model.", ""), ("model.language_model.", "model."))
_OTHER_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
_DUMMY_STD = 0.02


def load_weights(
    files: Sequence[Path], spec: ModelSpec, dtype: torch.dtype, progress: Progress
) -> dict[str, torch.Tensor]:
    """Every tensor of `spec.tensor_shapes()`, on the CPU, in `dtype`. Tensors already in it stay memory-mapped.

    `progress` is called with the share done, 0 to 1. StartupError names the first missing or unexpected tensor.
    """
    shapes = spec.tensor_shapes()
    weights: dict[str, torch.Tensor] = {}
    for path in files:
        for name, tensor in _read_file(path, spec, shapes):
            weights[name] = tensor.to(dtype)
            progress(len(weights) / len(shapes))
    missing = next((name for name in shapes if name not in weights), None)
    if missing is not None:
        where = files[0].parent if files else "the model"
        raise StartupError(f"{where}: tensor {missing} is missing ({len(weights)} of {len(shapes)} found)")
    return weights


def _read_file(path: Path, spec: ModelSpec, shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, tensor) of the tensors that the spec asks for; checks the rest."""
    try:
        with safe_open(str(path), framework="pt") as file:
            for stored_name in file.keys():  # noqa: SIM118 - not a dict
                name = _language_name(stored_name)
                if name is None or (name == "lm_head.weight" and spec.tie_word_embeddings):
                    continue
                if name not in shapes:
                    raise StartupError(f"{path.name}: unexpected tensor {stored_name} for a {spec.family} model")
                tensor = file.get_tensor(stored_name)
                if tuple(tensor.shape) != shapes[name]:
                    raise StartupError(f"{path.name}: {name} has shape {tuple(tensor.shape)}, expected {shapes[name]}")
                yield name, tensor
    except (OSError, SafetensorError) as error:
        raise StartupError(f"{path} cannot be read: {error}") from error


def _language_name(name: str) -> str | None:
    """The tensor's name in a text-only checkpoint; None for one that no text model needs."""
    if name.startswith(_OTHER_PREFIXES) or name.endswith(_IGNORED_SUFFIXES):
        return None
    for prefix, replacement in _LANGUAGE_PREFIXES:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


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
