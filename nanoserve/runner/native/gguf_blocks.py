"""The quantized blocks behind a converted model: from its source.json to the GGUF file and the rows in it.

Used by `executor` for `--quantization gguf`: the converted directory holds float32 values, the file the 4- and 8-bit
blocks they came from, which the engine can compute from directly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanoserve.hub.gguf_file import open_gguf
from nanoserve.hub.gguf_weights import block_types, read_blocks
from nanoserve.runner.native.library import SourceType
from nanoserve.runner.native.packing import GgufRows

_KINDS = {int(kind): kind for kind in SourceType if kind.name.startswith("GGUF")}


def source_files(model_dir: Path) -> list[Path]:
    """The GGUF file's parts that the directory was converted from; empty when there is none, or it is gone."""
    try:
        parts = json.loads((model_dir / "source.json").read_text(encoding="utf-8"))["parts"]
        files = [Path(part) for part in parts]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return files if all(file.is_file() for file in files) else []


def read_kinds(files: list[Path], config: Mapping[str, Any]) -> dict[str, SourceType]:
    """Block types of the tensors that can be computed from directly, by Hugging Face name. Reads the header only."""
    with open_gguf(files) as file:
        return {name: _KINDS[kind] for name, kind in block_types(file, dict(config)).items() if kind in _KINDS}


def read_rows(files: list[Path], config: Mapping[str, Any]) -> dict[str, GgufRows]:
    """The blocks of those tensors."""
    with open_gguf(files) as file:
        return {
            name: GgufRows(_KINDS[kind], rows) for name, kind, rows in read_blocks(file, dict(config)) if kind in _KINDS
        }
