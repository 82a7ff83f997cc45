"""The memory ledger: which part of this process holds how much of its resident memory.

Owner: each process. Large, long-lived memory is claimed once with `claim`; the pulse thread writes the ledger to a file
from time to time, and the api shows all of them in /server_info. Small objects that come and go are not claimed but
counted: their owner says with `count` how much they hold just now. What is resident is counted page by page in the
kernel's page map, because memory that was allocated and never touched (most of a fresh KV cache) costs nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

_PAGE = os.sysconf("SC_PAGE_SIZE")
# An entry of /proc/self/pagemap is 8 bytes a page. Bit 63: present. Bit 61: of a file. Bit 56: mapped here only, which
# the kernel's one page of zeros is not: memory that was read but never written is present and yet not resident.
_ENTRY_BYTES = 8
_NOT_FILE = bytes(top for top in range(256) if top & 0xA0 != 0xA0)
_NOT_ANONYMOUS = bytes(top for top in range(256) if top & 0xA1 != 0x81)
_CHUNK_PAGES = 1 << 17

_claims: dict[int, tuple[str, int]] = {}  # address -> owner, bytes
_counts: dict[str, Callable[[], int]] = {}  # owner -> bytes now


def claim(owner: str, address: int, num_bytes: int) -> None:
    """Says that `num_bytes` from `address` on belong to `owner` ("weights", "kv cache") for life."""
    if num_bytes:
        _claims[address] = (owner, num_bytes)


def count(owner: str, num_bytes: Callable[[], int]) -> None:
    """Has `owner` asked for the bytes of its objects whenever the ledger is made, on another thread than its own."""
    _counts[owner] = num_bytes


def resident_bytes(address: int, num_bytes: int) -> tuple[int, int]:
    """How much of a range is in memory: anonymous bytes, bytes of a file. All of it where the kernel does not tell."""
    first, last = address // _PAGE, -(-(address + num_bytes) // _PAGE)
    anonymous = files = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as page_map:  # noqa: PTH123 - unbuffered
            page_map.seek(first * _ENTRY_BYTES)
            for start in range(first, last, _CHUNK_PAGES):
                entries = page_map.read(min(_CHUNK_PAGES, last - start) * _ENTRY_BYTES)
                tops = entries[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
                anonymous += len(tops.translate(None, _NOT_ANONYMOUS))
                files += len(tops.translate(None, _NOT_FILE))
    except OSError:
        return num_bytes, 0
    return min(anonymous * _PAGE, num_bytes), min(files * _PAGE, num_bytes)


def ledger() -> dict[str, int]:
    """Bytes by owner; they add up to `rss`. `heap` is all that has no other owner: objects, buffers, stacks."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    anonymous, files = (
        sum(int(status[key].split()[0]) << 10 for key in keys if key in status)
        for keys in (("RssAnon",), ("RssFile", "RssShmem"))
    )
    owners: dict[str, int] = {}
    for address, (owner, num_bytes) in list(_claims.items()):
        held_anonymous, held_files = resident_bytes(address, num_bytes)
        owners[owner] = owners.get(owner, 0) + held_anonymous + held_files
        anonymous -= held_anonymous
        files -= held_files
    for owner, num_bytes_now in list(_counts.items()):
        owners[owner] = min(num_bytes_now(), anonymous)
        anonymous -= owners[owner]
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
