"""Logprob entries: each token with its name for people, its real bytes, and the frame that it belongs into. Pure.

Called by the detokenizer's manager, one `ScoreLine` per request that asked for log-probabilities. The bytes of all
entries joined are the UTF-8 of the text: skipped special tokens and a final stop id have none, and a cut by a stop
string cuts them too. (Bytes that are no UTF-8 stay as they are, where the text shows U+FFFD.) An entry waits until the
last character that it takes part in is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from nanoserve.detok.incremental import TextStream, WindowDecoder, decode_or_none, find_anchor, take_utf8
from nanoserve.detok.token_table import TokenTable
from nanoserve.ipc.messages import RowLogprobs, TokenText
from nanoserve.tokenizer import Tokenizer


class TokenNames:
    """Text and bytes of single tokens: from the table, or asked of the tokenizer one by one where there is none."""

    def __init__(self, tokenizer: Tokenizer, table: TokenTable | None, windows: WindowDecoder) -> None:
        self.special_ids = tokenizer.special_ids
        self.has_table = table is not None
        self.head_matters = table is not None and not table.head_free
        self._tokenizer = tokenizer
        self._table = table
        self._windows = windows
        self._anchor = find_anchor(tokenizer, tokenizer.special_ids)
        self._head = len(tokenizer.decode(self._anchor, skip_special_tokens=False))
        self._texts: dict[int, str] = {}

    def raw(self, token_id: int) -> bytes:
        """The token's bytes after other text; nothing for an id without a token."""
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return b""
        return self._table.raw(token_id) if self._table is not None else self._text(token_id).encode()

    def shown_bytes(self, token_id: int, piece: str, *, at_head: bool) -> bytes:
        """What this token adds to the text, where `piece` is what the decoder released for it."""
        if self._table is None:
            return piece.encode()
        raw = self.raw(token_id)
        if not (at_head and raw and self.head_matters):
            return raw
        if self._table.texts[token_id] is not None:
            return piece.encode()
        # A part of a character is no text yet: all that a beginning drops is a space before it.
        return raw[_leading_spaces(raw.decode("utf-8", "replace")) - _leading_spaces(piece) :]

    def text(self, token_id: int) -> str:
        """For people: whole characters as they are (with their leading space), parts of characters as `bytes:\\xe2`."""
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return f"token_id:{token_id}"
        if self._table is None:
            return self._text(token_id)
        text = self._table.texts[token_id]
        return escape(self._table.parts[token_id]) if text is None else text

    def unfinished(self, stream: TextStream) -> tuple[int, bytes]:
        """What the decoder holds of a text: whole characters, and the bytes of an unfinished one."""
        if not stream.held or self._table is None:
            return 0, stream.pending
        _, pending = take_utf8(b"", b"".join(map(self.raw, stream.context)))
        return int(not pending), pending

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Released text per id of a whole prompt, special tokens left out."""
        stream = self._windows.open((), skip_special=True)
        pieces = self._windows.decode([(stream, list(token_ids), True)])[0]
        return pieces if pieces is not None else [""] * len(token_ids)

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            whole = decode_or_none(self._tokenizer, [*self._anchor, token_id])
            text = self._texts[token_id] = "" if whole is None else whole[self._head :]
        return text


def _leading_spaces(text: str) -> int:
    return len(text) - len(text.lstrip(" "))


def escape(raw: bytes) -> str:
    """Bytes that are no whole characters, as OpenAI prints them; different bytes print differently."""
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@dataclass(slots=True)
class _Waiting:
    token: TokenText
    ready_chars: int  # how many characters are out once all of this token is
    before: bytes  # the unfinished bytes that this token goes on with


class ScoreLine:
    """The entries of one request, in order, until they may travel.

    It may begin in the middle of a text (a resumed request): after `num_chars` characters and the `pending` bytes of
    an unfinished one.
    """

    def __init__(self, names: TokenNames, *, skip_special: bool, num_chars: int = 0, pending: bytes = b"") -> None:
        self._names = names
        self._skipped = names.special_ids if skip_special else frozenset()
        self._waiting: deque[_Waiting] = deque()
        self._chars = num_chars
        self._pending = pending
        self._next_index: int | None = None

    def skip(self, token_id: int, piece: str, *, at_head: bool = False) -> None:
        """One more token of the text without scores (a resumed request's old ones)."""
        self._advance(token_id, piece, at_head, hidden=False)

    def add(
        self,
        token_id: int,
        scores: RowLogprobs,
        at: int,
        *,
        index: int,
        piece: str,
        at_head: bool = False,
        hidden: bool = False,
    ) -> None:
        """One more token: `scores` at position `at` are its own, `index` is its place in the output.

        `piece` is the text that the decoder released for it; it counts where the table does not: `at_head`, at the
        very beginning of a text. A `hidden` token (a final stop id) is not part of the text.
        """
        if self._next_index is None:
            self._next_index = index
        before, offset = self._pending, self._chars
        raw = self._advance(token_id, piece, at_head, hidden)
        token = self._entry(token_id, raw, scores, at, offset)
        self._waiting.append(_Waiting(token, self._chars + bool(self._pending), before))

    def _advance(self, token_id: int, piece: str, at_head: bool, hidden: bool) -> bytes:
        """Counts the characters that a token finishes; returns the bytes it adds to the text."""
        if hidden or token_id in self._skipped:
            return b""
        raw = self._names.shown_bytes(token_id, piece, at_head=at_head and not self._pending and not self._chars)
        text, self._pending = take_utf8(self._pending, raw)
        self._chars += len(text)
        return raw

    def take(self, sent_chars: int) -> tuple[int, list[TokenText]]:
        """The entries whose last byte is out, and the output index of the first of them."""
        taken: list[TokenText] = []
        while self._waiting and self._waiting[0].ready_chars <= sent_chars:
            taken.append(self._waiting.popleft().token)
        first = self._next_index or 0
        self._next_index = first + len(taken)
        return first, taken

    def cut(self, num_chars: int) -> tuple[int, list[TokenText]]:
        """All entries that wait, with their bytes cut where the text ends (a stop string, or the end of all)."""
        taken = [_cut(entry, num_chars) for entry in self._waiting]
        self._waiting.clear()
        first = self._next_index or 0
        self._next_index = first + len(taken)
        return first, taken

    def _entry(self, token_id: int, raw: bytes, scores: RowLogprobs, at: int, offset: int) -> TokenText:
        names = self._names
        return TokenText(
            token_id,
            names.text(token_id) if names.has_table or not raw else raw.decode("utf-8", "replace"),
            raw,
            scores.logprobs[at],
            scores.ranks[at],
            top_entries(names, scores, at),
            offset,
        )


def top_entries(names: TokenNames, scores: RowLogprobs, at: int) -> list[tuple[int, str, bytes, float]]:
    """The most likely tokens at one position, each with its name and bytes."""
    if at >= len(scores.top_ids):
        return []
    return [
        (token_id, names.text(token_id), names.raw(token_id), logprob)
        for token_id, logprob in zip(scores.top_ids[at], scores.top_logprobs[at], strict=True)
    ]


def _cut(entry: _Waiting, num_chars: int) -> TokenText:
    token = entry.token
    if entry.ready_chars <= num_chars:
        return token
    room = max(0, num_chars - token.text_offset)
    text, pending, size = "", entry.before, 0
    for size, byte in enumerate(token.raw):  # by bytes: a U+FFFD of the text is not three of them
        piece, pending = take_utf8(pending, bytes((byte,)))
        text += piece
        if len(text) + bool(pending) > room:
            return msgspec.structs.replace(token, raw=token.raw[:size])
    return token


def prompt_entries(names: TokenNames, token_ids: Sequence[int], scores: RowLogprobs) -> list[TokenText]:
    """The prompt's own tokens: bytes of the text that is shown for them, none for special ones."""
    pieces = names.pieces(token_ids)
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + len(piece))
    entries: list[TokenText] = []
    for at, (token_id, piece, (offset, _)) in enumerate(zip(token_ids, pieces, pairwise(offsets), strict=True)):
        special = token_id in names.special_ids
        raw = b"" if special else names.shown_bytes(token_id, piece, at_head=offset == 0)
        text = piece if piece and offset == 0 else names.text(token_id)
        top = top_entries(names, scores, at)
        entries.append(TokenText(token_id, text, raw, scores.logprobs[at], scores.ranks[at], top, offset))
    return entries
