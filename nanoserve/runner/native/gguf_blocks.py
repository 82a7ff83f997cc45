"""The quantized blocks behind a converted model: from its source.json to the GGUF file and the rows in it.

Used by `open`: the converted directory holds float32 values, the file the 4- and 8-bit blocks they came from, which the
engine can compute from directly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nanoserve.hub.cache import SOURCE_FILE
from nanoserve.hub.gguf_file import open_gguf
from nanoserve.hub.gguf_weights import block_types, read_blocks
from nanoserve.runner.native.library import SourceType
from nanoserve.runner.native.packing import Bytes, GgufRows

_Q5_0 = 6
_KINDS = {int(kind): kind for kind in SourceType if kind.name.startswith("GGUF")} | {_Q5_0: SourceType.GGUF_Q8_0}


def came_from_gguf(model_dir: Path) -> bool:
    """Whether the directory was converted from a GGUF file, be that file still there or not."""
    return (model_dir / SOURCE_FILE).is_file()


def source_files(model_dir: Path) -> list[Path]:
    """The GGUF file's parts that the directory was converted from; empty when there is none, or it is gone."""
    try:
        parts = json.loads((model_dir / SOURCE_FILE).read_text(encoding="utf-8"))["parts"]
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
            name: GgufRows(_KINDS[kind], _widen_q5(rows) if kind == _Q5_0 else rows)
            for name, kind, rows in read_blocks(file, dict(config))
            if kind in _KINDS
        }


def _widen_q5(rows: Bytes) -> Bytes:
    """Q5_0 as Q8_0: the same fp16 scale and q - 16 as a whole byte, so exactly the same weights.

    A Q5_0 block is the scale, 4 bytes with the fifth bits of 32 weights, and 16 bytes with the low 4 bits of weights i
    and i + 16.
    """
    blocks = rows.reshape(rows.shape[0], -1, 22)
    low = np.concatenate([blocks[..., 6:] & 15, blocks[..., 6:] >> 4], axis=-1)
    fifth = np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")
    values = ((low | fifth << 4).astype(np.int8) - 16).view(np.uint8)
    widened: Bytes = np.concatenate([blocks[..., :2], values], axis=-1)
    return widened.reshape(rows.shape[0], -1)
