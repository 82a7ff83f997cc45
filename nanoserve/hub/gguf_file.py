"""Reading the GGUF container: metadata, tensor directory, raw tensor bytes; also from a file in several parts.

Used by the converter only (in the process that prepares the model). The `gguf` package's own reader builds numpy
views of every array element, which takes 9 s for a vocabulary of 262,144 tokens and cannot join parts; this one
takes under a second. Format: the GGUF specification of ggml, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.errors import StartupError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# GGUF value type -> struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_READ_AHEAD = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor directory. `shape` is rows first, as numpy counts; `offset` counts from the file's
    first byte; `ggml_type` is the number in ggml.h."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufFile:
    """An open GGUF file. Use `open_gguf`; not safe to share between threads while reading metadata."""

    def __init__(self, paths: Sequence[Path], descriptors: Sequence[int]) -> None:
        self.name = paths[0].name
        self._descriptors = list(descriptors)
        self._sizes = [os.fstat(descriptor).st_size for descriptor in descriptors]
        self.size = sum(self._sizes)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._parse()

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Bytes at an absolute offset, across the joints of the parts. StartupError past the end."""
        pieces = []
        for descriptor, size in zip(self._descriptors, self._sizes, strict=True):
            while num_bytes > 0 and offset < size:
                piece = os.pread(descriptor, min(num_bytes, size - offset), offset)
                if not piece:
                    raise StartupError(f"{self.name} became shorter while it was read")
                pieces.append(piece)
                offset += len(piece)
                num_bytes -= len(piece)
            offset -= size
        if num_bytes > 0:
            raise StartupError(f"{self.name} is truncated")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _parse(self) -> None:
        cursor = _Cursor(self)
        if cursor.take(4) != _MAGIC:
            raise StartupError(f"{self.name} is not a GGUF file")
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise StartupError(f"{self.name}: GGUF version {version} is not supported (only 2 and 3, little-endian)")
        num_tensors, num_fields = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_fields):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        entries = []
        for _ in range(num_tensors):
            name = cursor.string()
            num_dims = cursor.scalar("I")
            if num_dims > 8:
                raise StartupError(f"{self.name} is damaged: a tensor of {num_dims} dimensions")
            dims = struct.unpack(f"<{num_dims}Q", cursor.take(8 * num_dims))
            entries.append((name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise StartupError(f"{self.name} is damaged: alignment {alignment!r}")
        start = -(-cursor.offset // alignment) * alignment
        for name, shape, ggml_type, offset in entries:
            self.tensors[name] = TensorInfo(name, shape, ggml_type, start + offset)


class _Cursor:
    """Sequential reading of the metadata, a few MiB at a time."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._buffer = b""
        self._position = 0
        self._end = 0  # absolute offset of the buffer's end

    @property
    def offset(self) -> int:
        return self._end - len(self._buffer) + self._position

    def take(self, num_bytes: int) -> bytes:
        stop = self._position + num_bytes
        if stop > len(self._buffer):
            missing = stop - len(self._buffer)
            left = self._file.size - self._end
            if missing > left:  # checked before allocating: the length may be garbage
                raise StartupError(f"{self._file.name} is truncated or damaged")
            fresh = self._file.read(self._end, min(left, max(missing, _READ_AHEAD)))
            self._buffer = self._buffer[self._position :] + fresh
            self._end += len(fresh)
            self._position, stop = 0, num_bytes
        piece = self._buffer[self._position : stop]
        self._position = stop
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        """One metadata value; arrays become lists."""
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                code = _SCALARS[item]
                return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize(code))))
            if item != _STRING:
                raise StartupError(f"{self._file.name} is damaged: an array of type {item}")
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise StartupError(f"{self._file.name} is damaged: unknown value type {kind}")
        return self.scalar(_SCALARS[kind])


@contextmanager
def open_gguf(paths: Sequence[Path]) -> Iterator[GgufFile]:
    """Opens a GGUF file given as one path or as its parts in order. Raises StartupError, one line, when a part
    cannot be read or the content is no GGUF."""
    descriptors: list[int] = []
    try:
        for path in paths:
            try:
                descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as exc:
                raise StartupError(f"cannot read {path}: {exc.strerror}") from exc
        yield GgufFile(paths, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
