"""Every token's own bytes, and the proof that a tokenizer's decode is nothing but their concatenation.

Owner: the detokenizer (and `nanoserve.LLM`), built once at start and kept on disk under the hash of the tokenizer's
file. The byte decoder may run only when `build_table` has found it equal to the tokenizer over the whole vocabulary;
logprob entries take their `bytes` from the same table.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import msgspec

from nanoserve.detok.incremental import NOT_A_TOKENIZERS, REPLACEMENT, find_anchor
from nanoserve.tokenizer import TOKENIZER_FILES, TekkenTokenizer, Tokenizer

_FORMAT = 1  # raise it when the file's content or the check changes
_SLICE = 16384
_RUN = 64
_STRIDE = 7919  # prime: walks the whole vocabulary in an order that no vocabulary is sorted in
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>\Z")


class TokenTable(msgspec.Struct, frozen=True, dict=True):
    """One vocabulary. `texts[i]` is None where token i is not made of whole characters; its bytes are in `parts`."""

    texts: list[str | None]
    parts: dict[int, bytes]
    head_free: bool  # a token has the same text at the very beginning as anywhere else
    special_ids: list[int]

    @cached_property
    def shown(self) -> list[str | None]:
        """`texts` for requests that skip special tokens."""
        texts = list(self.texts)
        for token_id in self.special_ids:
            if token_id < len(texts):
                texts[token_id] = ""
        return texts

    def raw(self, token_id: int) -> bytes:
        """The token's own bytes, as anywhere but at the beginning of a text."""
        text = self.texts[token_id]
        return self.parts[token_id] if text is None else text.encode()


def load_or_build_table(tokenizer: Tokenizer, tokenizer_path: Path, cache_dir: Path) -> TokenTable | None:
    """The table of the tokenizer in this directory or file, from the cache when it is there.

    None when the vocabulary is not proved equal to the concatenation of its tokens' bytes. A cache that cannot be
    read or written costs time only.
    """
    cached = cache_dir / "token-tables" / f"{_file_key(tokenizer_path)}-{_FORMAT}.msgpack"
    try:
        return msgspec.msgpack.decode(cached.read_bytes(), type=TokenTable | None)
    except (OSError, msgspec.MsgspecError):
        pass
    table = build_table(tokenizer)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=cached.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.msgpack.encode(table))
        Path(name).replace(cached)
    except OSError:
        pass
    return table


def _file_key(path: Path) -> str:
    if path.is_dir():
        path = next(path / name for name in TOKENIZER_FILES if (path / name).is_file())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def build_table(tokenizer: Tokenizer) -> TokenTable | None:
    """Derives the table and checks it: each token on its own, then all of them in long mixed runs.

    None when any row of the check differs or fails, or when a token's bytes cannot be known. Costs one decode of the
    vocabulary token by token (two where the first token of a text is special) and one in runs: about 0.3 s per
    100,000 tokens.
    """
    try:
        return _prove(tokenizer) if tokenizer.vocab_size else None
    except NOT_A_TOKENIZERS:
        raise
    except BaseException:  # it fails on some token, be it with a panic: then only windows, row by row, are safe
        return None


def _prove(tokenizer: Tokenizer) -> TokenTable | None:
    anchor = find_anchor(tokenizer, tokenizer.special_ids)
    # Mostly a token has the same text at the beginning as anywhere. The runs prove it: there no token is the first.
    table = _table_of(tokenizer, _decode_each(tokenizer, []), head_free=True)
    if table is not None and _concatenates(tokenizer, table, anchor):
        return table
    if not anchor:
        return None
    head = tokenizer.decode(anchor, skip_special_tokens=False)
    after = _decode_each(tokenizer, anchor)
    if not all(text.startswith(head) for text in after):
        return None
    table = _table_of(tokenizer, [text[len(head) :] for text in after], head_free=False)
    return table if table is not None and _concatenates(tokenizer, table, anchor) else None


def _table_of(tokenizer: Tokenizer, decoded: list[str], *, head_free: bool) -> TokenTable | None:
    """The table that these texts of single tokens make, not yet checked."""
    texts: list[str | None] = list(decoded)
    parts: dict[int, bytes] = {}
    for token_id, text in enumerate(decoded):
        if REPLACEMENT in text:
            raw = _raw_bytes(tokenizer, token_id, text)
            if raw is None:
                return None
            if raw != text.encode():
                texts[token_id] = None
                parts[token_id] = raw
    return TokenTable(texts, parts, head_free, sorted(tokenizer.special_ids))


def _decode_each(tokenizer: Tokenizer, context: Sequence[int]) -> list[str]:
    size = tokenizer.vocab_size
    texts: list[str] = []
    for begin in range(0, size, _SLICE):
        rows = [[*context, token_id] for token_id in range(begin, min(begin + _SLICE, size))]
        texts += tokenizer.decode_batch(rows, skip_special_tokens=False)
    return texts


def _raw_bytes(tokenizer: Tokenizer, token_id: int, text: str) -> bytes | None:
    """Bytes of a token whose decode shows U+FFFD: the reading of its spelling that decodes to just that text."""
    spelled = tokenizer.id_to_token(token_id)
    if isinstance(tokenizer, TekkenTokenizer):
        readings: list[bytes | None] = [tokenizer.token_bytes(token_id)]
    elif spelled is None:
        return None
    else:
        byte = _BYTE_TOKEN.match(spelled)
        readings = [bytes.fromhex(byte[1]) if byte else None, _byte_level(spelled), text.encode()]
    return next((raw for raw in readings if raw is not None and raw.decode("utf-8", "replace") == text), None)


def _byte_level(spelled: str) -> bytes | None:
    """GPT-2's printable spelling of bytes, undone; None when a character stands for no byte."""
    values = [_BYTE_OF_CHAR.get(char) for char in spelled]
    return None if None in values else bytes(value for value in values if value is not None)


def _gpt2_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies spell bytes with: printable Latin-1 stays, the rest moves up."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [value for value in range(256) if value not in kept]
    return {chr(value): value for value in kept} | {chr(256 + i): value for i, value in enumerate(moved)}


_BYTE_OF_CHAR = _gpt2_alphabet()


def _concatenates(tokenizer: Tokenizer, table: TokenTable, anchor: list[int]) -> bool:
    """Whether runs over the whole vocabulary, in a mixed order, decode to their tokens' bytes joined.

    Byte tokens of SentencePiece are left out of the runs: for invalid bytes the library's answer is not the one
    that is right (ADR 0004). Each alone has been compared, and runs of valid ones are compared here.
    """
    size = len(table.texts)
    byte_ids = {raw[0]: token_id for token_id, raw in table.parts.items() if _is_byte_token(tokenizer, token_id)}
    left_out = frozenset(byte_ids.values())
    stride = _STRIDE if size % _STRIDE else _STRIDE + 2
    order = [i * stride % size for i in range(size)]
    order = [token_id for token_id in order if token_id not in left_out]
    runs = [order[i : i + _RUN] for i in range(0, size, _RUN)]
    runs.append([token_id for token_id in runs[0] for _ in range(2)])  # no decoder may fold repeats
    if len(byte_ids) == 128:  # 0x80..0xFF; the ASCII ones are whole characters
        runs += [[byte_ids[value] for value in char.encode()] for char in "é€😀한"]
    head = tokenizer.decode(anchor, skip_special_tokens=False) if anchor else ""
    joined = [head + b"".join(map(table.raw, run)).decode("utf-8", "replace") for run in runs]
    return list(tokenizer.decode_batch([anchor + run for run in runs], skip_special_tokens=False)) == joined


def _is_byte_token(tokenizer: Tokenizer, token_id: int) -> bool:
    return _BYTE_TOKEN.match(tokenizer.id_to_token(token_id) or "") is not None
