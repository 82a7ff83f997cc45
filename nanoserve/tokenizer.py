"""The tokenizer as every process sees it, and the one implementation over the `tokenizers` library.

Used by api (encode), detok (decode_batch, token bytes) and hub (self-checks). Imports neither torch nor
transformers: `tokenizers` costs 20 ms and 15 MB, `transformers` 3.8 s and 400 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text <-> ids. Implementations are safe to call from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that has a token (added tokens included)."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out of the text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def decode_batch(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """One text per row. Ids without a token decode to nothing; ids over 2**32 raise OverflowError."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it, None for an id without one."""
        ...

    def token_to_id(self, token: str) -> int | None: ...
