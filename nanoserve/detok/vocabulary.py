"""Everything of the detokenizer that depends on the tokenizer, chosen once at start. Owned by `DetokManager`.

Without a tokenizer (ids in, ids out) there is no `Vocabulary`.
"""

from __future__ import annotations

from nanoserve.detok.byte_decoder import ByteDecoder
from nanoserve.detok.incremental import Decoder, WindowDecoder
from nanoserve.detok.logprobs import TokenNames
from nanoserve.detok.token_table import TokenTable
from nanoserve.errors import StartupError
from nanoserve.tokenizer import Tokenizer


class Vocabulary:
    """A tokenizer, the decoder for it, and the names of its tokens."""

    def __init__(self, tokenizer: Tokenizer, mode: str, table: TokenTable | None) -> None:
        """`mode` is `--detokenizer`. StartupError when it asks for bytes and `table` is None: not proved."""
        windows = WindowDecoder(tokenizer)
        if mode == "bytes" and table is None:
            raise StartupError("--detokenizer bytes: this tokenizer's text is not the bytes of its tokens joined")
        self.size = tokenizer.vocab_size
        self.decoder_name = "window" if mode == "window" or table is None else "bytes"
        self.decoder: Decoder = ByteDecoder(table, windows) if table and self.decoder_name == "bytes" else windows
        self.names = TokenNames(tokenizer, table, windows)
        self._windows = windows
        self._tokenizer = tokenizer

    @property
    def num_cuts(self) -> int:
        """Windows of undecodable bytes that were cut at their cap."""
        return self._windows.num_cuts

    def lacks_any(self, token_ids: list[int]) -> bool:
        """Whether an id is outside the vocabulary."""
        return bool(token_ids) and (min(token_ids) < 0 or max(token_ids) >= self.size)

    def stop_tokens(self, stops: tuple[str, ...]) -> dict[int, str]:
        """Stop strings that are the name of one special token, which the text may never show."""
        ids = {stop: self._tokenizer.token_to_id(stop) for stop in stops}
        return {i: stop for stop, i in ids.items() if i is not None and i in self._tokenizer.special_ids}
