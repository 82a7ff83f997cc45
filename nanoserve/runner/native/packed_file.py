"""Packed weights in the cache, so that later starts only read them: no checkpoint parsing, no packing, no GGUF.

Used by `backend`. A file is a magic word, 8 bytes of header length, a JSON header with every section's place, then the
block at the next multiple of 4 KiB. Reading into huge pages was chosen over mapping the file: as quick from the page
cache, quicker to compute from, and a file cut short under a running server cannot end it by SIGBUS.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nanoserve.runner.native.library import Format
from nanoserve.runner.native.packing import ALIGNMENT, PackedWeights, Section

_MAGIC = b"nanopak1"  # another number with every change of what is packed
_CHUNK = 32 << 20


def fingerprint(files: Sequence[Path]) -> str:
    """Stands for the content of model files: a changed size or time of change means other weights."""
    digest = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        digest.update(f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:20]


def save_packed(packed: PackedWeights, path: Path) -> None:
    """Writes the file atomically. A cache that cannot be written is no fault: the next start packs again."""
    header = json.dumps(
        {name: [section.offset, section.num_bytes, section.format] for name, section in packed.sections.items()}
    ).encode()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(_MAGIC + struct.pack("<Q", len(header)) + header)
                file.write(b"\0" * (-file.tell() % ALIGNMENT))
                packed.memory[: packed.num_bytes].tofile(file)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def load_packed(path: Path, threads: int) -> PackedWeights | None:
    """The weights; None when there is no such file, or not all of it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        magic, length = struct.unpack("<8sQ", os.read(descriptor, 16))
        if magic != _MAGIC:
            return None
        header = json.loads(os.pread(descriptor, length, 16))
        start = -(-(16 + length) // ALIGNMENT) * ALIGNMENT
        sections = {
            name: Section(offset, num_bytes, None if form is None else Format(form))
            for name, (offset, num_bytes, form) in header.items()
        }
        packed = PackedWeights(sections)
        if os.fstat(descriptor).st_size != start + packed.num_bytes:
            return None

        def read(offset: int) -> bool:
            stop = min(offset + _CHUNK, packed.num_bytes)
            while offset < stop:
                count = os.preadv(descriptor, [packed.memory.data[offset:stop]], start + offset)
                if count <= 0:
                    return False
                offset += count
            return True

        with ThreadPoolExecutor(threads) as pool:
            complete = all(pool.map(read, range(0, packed.num_bytes, _CHUNK)))
        return packed if complete else None
    except (OSError, ValueError, struct.error):
        return None
    finally:
        os.close(descriptor)
