"""The memory ledger: which part of this process holds how much of its resident memory.

Owner: each process. Large, long-lived memory is claimed once with `claim`; the pulse thread writes the ledger to a file
from time to time, and the api shows all of them in /server_info. What is resident is counted page by page in the
kernel's page map, because memory that was allocated and never touched (most of a fresh KV cache) costs nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

_PAGE = os.sysconf("SC_PAGE_SIZE")
# An entry of /proc/self/pagemap is 8 bytes a page. Bit 63: the page is present. Bit 56: it is mapped here only, which is
# not so for the kernel's one page of zeros: memory that was read but never written is present and yet not resident.
_ENTRY_BYTES = 8
_NOT_PRESENT = bytes(range(128))
_NOT_OURS = bytes(top for top in range(256) if top & 0x81 != 0x81)
_CHUNK_PAGES = 1 << 17

_claims: dict[int, tuple[str, int, bool]] = {}  # address -> owner, bytes, mapped from a file


def claim(owner: str, address: int, num_bytes: int, *, is_file: bool = False) -> None:
    """Says that `num_bytes` from `address` on belong to `owner` ("weights", "kv cache") for life."""
    if num_bytes:
        _claims[address] = (owner, num_bytes, is_file)


def resident_bytes(address: int, num_bytes: int, *, is_file: bool = False) -> int:
    """How much of a range is in memory; all of it where the kernel does not tell."""
    first, last = address // _PAGE, -(-(address + num_bytes) // _PAGE)
    uncounted = _NOT_PRESENT if is_file else _NOT_OURS
    present = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as page_map:  # noqa: PTH123 - unbuffered
            page_map.seek(first * _ENTRY_BYTES)
            for start in range(first, last, _CHUNK_PAGES):
                entries = page_map.read(min(_CHUNK_PAGES, last - start) * _ENTRY_BYTES)
                present += len(entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES].translate(None, uncounted))
    except OSError:
        return num_bytes
    return min(present * _PAGE, num_bytes)


def ledger() -> dict[str, int]:
    """Bytes by owner; they add up to `rss`. `heap` is all that nobody has claimed: objects, buffers, stacks."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    anonymous, files = (
        sum(int(status[key].split()[0]) << 10 for key in keys if key in status)
        for keys in (("RssAnon",), ("RssFile", "RssShmem"))
    )
    owners: dict[str, int] = {}
    for address, (owner, num_bytes, is_file) in list(_claims.items()):
        held = resident_bytes(address, num_bytes, is_file=is_file)
        owners[owner] = owners.get(owner, 0) + held
        if is_file:
            files -= held
        else:
            anonymous -= held
    return {"rss": anonymous + files + sum(owners.values()), **owners, "code and files": files, "heap": anonymous}


def write_ledger(path: Path) -> None:
    """Writes the ledger as JSON, whole or not at all; a full disk costs this one."""
    temporary = path.with_suffix(".tmp")
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(ledger()))
        temporary.replace(path)


def read_ledger(path: Path) -> dict[str, int]:
    """What another process wrote last; empty when there is nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except (OSError, msgspec.MsgspecError):
        return {}
