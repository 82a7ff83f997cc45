"""A GGUF file becomes a model directory in the cache: weights, config, tokenizer, template, where it came from.

Called by `hub.resolve` in the process that prepares the model; that process imports numpy and the `gguf` package
for it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from nanoserve.errors import StartupError
from nanoserve.hub import gguf_config, gguf_tokenizer, gguf_weights
from nanoserve.hub.cache import CONVERTER_VERSION, SOURCE_FILE, make_directory, write_json
from nanoserve.hub.gguf_file import GgufFile, open_gguf

_SPARE_BYTES = 64 << 20


def convert_gguf(
    paths: Sequence[Path], target: Path, sha256: str, progress: Callable[[float], None], *, weights: bool
) -> Path:
    """Converts the GGUF file (its parts in order) into the directory `target`, atomically, and returns it.

    With `weights=False` everything but the weights is written. `progress` gets the done part, 0..1. Raises
    StartupError, one line, for a file that is broken or of a kind that is not supported. A tokenizer that cannot
    be rebuilt does not fail the conversion: --tokenizer may stand in; the reason is kept in source.json.
    """
    with open_gguf(paths) as file:
        config = gguf_config.build_config(file, gguf_weights.read_rope_factors(file))

        def build(directory: Path) -> None:
            error = _write_tokenizer(file, directory)
            if weights:
                _check_space(directory, gguf_weights.weights_num_bytes(file, config))
                gguf_weights.write_safetensors(file, config, directory / "model.safetensors", progress)
            write_json(directory / "config.json", config)
            write_json(directory / "generation_config.json", gguf_config.build_generation_config(file))
            source = {
                "path": str(paths[0].absolute()),
                "parts": [str(path.absolute()) for path in paths],
                "sha256": sha256,
                "converter_version": CONVERTER_VERSION,
                "tokenizer_error": error,
            }
            write_json(directory / SOURCE_FILE, source)

        made = make_directory(target, build)
    progress(1.0)
    return made


def _write_tokenizer(file: GgufFile, directory: Path) -> str | None:
    """Writes the tokenizer files; returns why there is no tokenizer.json where it cannot be rebuilt."""
    write_json(directory / "tokenizer_config.json", gguf_tokenizer.build_tokenizer_config(file))
    template = gguf_tokenizer.chat_template(file)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    try:
        tokenizer = gguf_tokenizer.build_tokenizer(file)
    except StartupError as exc:
        return str(exc)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    return None


def _check_space(directory: Path, num_bytes: int) -> None:
    """Better one line now than a full disk in the middle of it."""
    free = shutil.disk_usage(directory).free
    if num_bytes + _SPARE_BYTES > free:
        raise StartupError(
            f"converting the model needs {num_bytes >> 20} MiB in {directory.parent}, {free >> 20} MiB are free; "
            "choose another place with --cache-dir"
        )
