"""The cache of prepared models: where it is, directories that appear whole or not at all, remembered file hashes.

Used by `hub.resolve` and the converter, in whichever process prepares the model. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanoserve.config import ModelConfig
from nanoserve.errors import StartupError

# Raise it with every change of what a conversion writes.
CONVERTER_VERSION = 1
SOURCE_FILE = "source.json"  # in a converted directory: the GGUF's path, hash, and this converter's version

_TEMPORARY = ".tmp-"
# A directory that nobody wrote to for so long belongs to a process that was killed.
_STALE_AFTER_S = 3600.0
_HASH_CHUNK = 4 << 20


def cache_root(config: ModelConfig) -> Path:
    """--cache-dir, else $XDG_CACHE_HOME/nanoserve, else ~/.cache/nanoserve. Not created here."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "nanoserve"


def converted_path(root: Path, name: str, sha256: str, *, weights: bool) -> Path:
    """Where the conversion of a GGUF with this content lies, whether it exists or not.

    The name carries the content's hash and the converter's version, so neither a changed file nor a changed
    converter ever meets an old directory.
    """
    kind = "models" if weights else "tokenizers"
    return root / kind / f"{name}-{sha256[:16]}-v{CONVERTER_VERSION}"


def make_directory(final: Path, build: Callable[[Path], None]) -> Path:
    """Makes `final` with what `build` writes into the directory it is given; readers never see a part of it.

    Everything is written and synced beside it first, then renamed. When another process was quicker its directory
    is taken: both hold the same content. A failed or killed build leaves nothing under the final name. Raises
    StartupError when the disk refuses.
    """
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(final.parent)
        temporary = final.parent / f"{_TEMPORARY}{final.name}-{os.getpid()}-{secrets.token_hex(4)}"
        temporary.mkdir()
        try:
            build(temporary)
            _sync_tree(temporary)
            _rename(temporary, final)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        _sync(final.parent)
    except OSError as exc:
        raise StartupError(f"cannot write {final}: {exc.strerror or exc}") from exc
    return final


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def hash_files(paths: Sequence[Path], progress: Callable[[float], None]) -> str:
    """SHA-256 (hex) over the files' bytes joined in order; `progress` gets the done part, 0..1."""
    digest = hashlib.sha256()
    done, total = 0, max(1, sum(path.stat().st_size for path in paths))
    for path in paths:
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                digest.update(chunk)
                done += len(chunk)
                progress(min(1.0, done / total))
    return digest.hexdigest()


def fingerprint(paths: Sequence[Path]) -> list[list[Any]]:
    """Name, size and time of change of each file."""
    stats = [path.stat() for path in paths]
    return [[str(path.absolute()), stat.st_size, stat.st_mtime_ns] for path, stat in zip(paths, stats, strict=True)]


def remembered_hash(root: Path, paths: Sequence[Path]) -> str | None:
    """The hash noted for these files, None when none is or when a size or a time of change differs."""
    try:
        noted = json.loads(_index_path(root, paths).read_text(encoding="utf-8"))
        if noted["files"] == fingerprint(paths) and isinstance(noted["sha256"], str):
            return str(noted["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no note, or a broken one: the files are hashed again
    return None


def remember_hash(root: Path, paths: Sequence[Path], files: list[list[Any]], sha256: str) -> None:
    """Notes the hash, so that a later start need not read the files. A note that cannot be written is no fault.

    `files` is the `fingerprint` from before the hash was taken: a file that changed meanwhile is then hashed again.
    """
    target = _index_path(root, paths)
    with contextlib.suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{os.getpid()}")
        write_json(temporary, {"files": files, "sha256": sha256})
        temporary.replace(target)


def _index_path(root: Path, paths: Sequence[Path]) -> Path:
    names = "\n".join(str(path.absolute()) for path in paths)
    return root / "index" / f"{hashlib.sha256(names.encode(errors='surrogateescape')).hexdigest()[:32]}.json"


def _rename(source: Path, final: Path) -> None:
    try:
        source.rename(final)
    except OSError:
        if not final.is_dir():
            raise  # otherwise another process was quicker


def _sync_tree(directory: Path) -> None:
    for path in directory.iterdir():
        if not path.is_symlink():
            _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_stale(parent: Path) -> None:
    """Clears away what killed processes left; a directory that is being written to has a fresh file in it."""
    limit = time.time() - _STALE_AFTER_S
    for path in parent.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if max(item.lstat().st_mtime for item in (path, *path.iterdir())) < limit:
                shutil.rmtree(path, ignore_errors=True)
