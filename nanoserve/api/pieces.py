"""Tokens as text, or as bytes where a token is not whole characters. Pure.

Owner process: api. Called by /tokenize. The byte spellings are the two in use: GPT-2's printable alphabet for
byte-level vocabularies, and `<0xE2>` for byte fallback.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nanoserve.tokenizer import Tokenizer

_FALLBACK = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters stand for themselves, the other bytes follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(rest)}


_ALPHABET = _byte_alphabet()


def token_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str | list[int]]:
    """One piece per id: its text, or its bytes as a list of numbers when they are no whole characters."""
    return [_piece(tokenizer, token_id) for token_id in ids]


def _piece(tokenizer: Tokenizer, token_id: int) -> str | list[int]:
    text = tokenizer.decode([token_id], skip_special_tokens=False)
    if "\ufffd" not in text:
        return text
    spelled = tokenizer.id_to_token(token_id) or ""
    if match := _FALLBACK.match(spelled):
        return [int(match.group(1), 16)]
    if spelled and all(char in _ALPHABET for char in spelled):
        return [_ALPHABET[char] for char in spelled]
    return text
