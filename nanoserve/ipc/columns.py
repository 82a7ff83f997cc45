"""Token ids as packed little-endian int32: the only binary column on the wire."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

_SWAP = sys.byteorder == "big"


def pack_ids(ids: Iterable[int]) -> bytes:
    """Packs token ids; OverflowError for an id that does not fit 32 bits."""
    column = array("i", ids)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The inverse of `pack_ids`; ValueError when the length is not a multiple of four."""
    column = array("i")
    column.frombytes(data)
    if _SWAP:
        column.byteswap()
    return column.tolist()
