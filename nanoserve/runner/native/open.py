"""From a model directory to a `NativeBackend`, quantized as asked. Called by `executor` and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from nanoserve.errors import ConfigError
from nanoserve.hub.model_files import ModelFiles
from nanoserve.runner.models.spec import ModelSpec
from nanoserve.runner.native.backend import NativeBackend, NativeOptions, Progress
from nanoserve.runner.native.library import SourceType
from nanoserve.runner.native.packing import Weights

ReadWeights = Callable[[torch.dtype], dict[str, torch.Tensor]]


def open_native(
    files: ModelFiles,
    spec: ModelSpec,
    options: NativeOptions,
    read: ReadWeights,
    progress: Progress,
    *,
    has_blocks: bool = True,
) -> NativeBackend:
    """The backend; `read` gives the checkpoint in a type and is called only where no packed weights are cached.

    `has_blocks`: what it gives is the files' own, so that blocks of the GGUF file can stand for it.

    ConfigError when the GGUF blocks are asked for and the directory did not come from a GGUF file that is still there
    ("int8-dynamic": came from one that is gone); `NativeUnavailable` as in `NativeBackend`.
    """
    wants_blocks = has_blocks and options.quantization in ("auto", "gguf", "int8-dynamic")

    def kinds() -> Mapping[str, SourceType]:
        # Importing this takes 2 s (the gguf package imports tokenizers of all sorts): only where there is work to do.
        from nanoserve.runner.native.gguf_blocks import came_from_gguf, read_kinds, source_files

        sources = source_files(files.path) if wants_blocks else []
        asked = options.quantization
        if not sources and has_blocks and asked == "int8-dynamic" and came_from_gguf(files.path):
            raise ConfigError("--quantization int8-dynamic: the GGUF file that the model was converted from is gone")
        if not sources and asked == "gguf":
            why = "the model was not converted from a GGUF file, or that file is gone"
            raise ConfigError(f"--quantization gguf: {why if has_blocks else 'dummy weights have no blocks'}")
        return read_kinds(sources, files.config) if sources else {}

    def load() -> Weights:
        from nanoserve.runner.native.gguf_blocks import read_rows, source_files

        sources = source_files(files.path) if wants_blocks else []
        # int8 starts from float32, so that a weight is rounded once and not twice.
        tensors = read(torch.float32 if options.quantization in ("int8", "int8-dynamic") else torch.bfloat16)
        return Weights(tensors, read_rows(sources, files.config) if sources else {})

    return NativeBackend(spec, load, options, progress, kinds)
