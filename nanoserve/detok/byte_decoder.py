"""Ids to text by a table of bytes and incremental UTF-8: no tokenizer call per step. Pure.

Allowed only for vocabularies whose `TokenTable` has been proved. A token of whole characters costs one list access;
a part of a character goes through `take_utf8`, which knows invalid bytes from unfinished ones at once, so that
nothing is held that no further byte can change. Where the first token of a text is special (a leading space is
dropped), the window decoder says how a text begins, up to its first whole character.
"""

from __future__ import annotations

from collections.abc import Sequence

from nanoserve.detok.incremental import REPLACEMENT, Chunk, TextStream, WindowDecoder, take_utf8
from nanoserve.detok.token_table import TokenTable

_NOT_FIRST = [0]  # a context that says only that there is one


class ByteDecoder:
    """Implements `incremental.Decoder` for one proved vocabulary."""

    def __init__(self, table: TokenTable, windows: WindowDecoder) -> None:
        self._table = table
        self._windows = windows
        self._texts = table.texts
        self._shown = table.shown
        self._special = frozenset(table.special_ids)

    def open(self, prompt_tail: Sequence[int], *, skip_special: bool) -> TextStream:
        if self._table.head_free:
            return TextStream(skip_special=skip_special, context=_NOT_FIRST)
        return self._windows.open(prompt_tail, skip_special=skip_special)

    def decode(self, chunks: Sequence[Chunk]) -> list[list[str] | None]:
        out: list[list[str] | None] = []
        heads: list[int] = []
        shown, all_texts, parts = self._shown, self._texts, self._table.parts
        for place, (stream, token_ids, per_token) in enumerate(chunks):
            if not stream.context:
                heads.append(place)
                out.append(None)
                continue
            texts = shown if stream.skip_special else all_texts
            if len(token_ids) != 1:
                out.append(self._many(stream, token_ids, texts, per_token))
                continue
            text = texts[token_ids[0]]
            if text is None:
                text, stream.pending = take_utf8(stream.pending, parts[token_ids[0]])
            elif stream.pending:
                text, stream.pending = take_utf8(stream.pending, text.encode())
            out.append([text])
        if heads:
            self._decode_heads(chunks, heads, out)
        return out

    def flush(self, stream: TextStream) -> str:
        return self._windows.flush(stream)

    def _decode_heads(self, chunks: Sequence[Chunk], places: list[int], out: list[list[str] | None]) -> None:
        """The chunks at `places`, where text has not begun: windows up to the token that begins it, bytes from there.

        Just so far and no further, so that the answer does not depend on how the ids came.
        """
        begins: list[Chunk] = []
        for place in places:
            stream, token_ids, _ = chunks[place]
            texts = self._shown if stream.skip_special else self._texts
            end = next((at + 1 for at, token_id in enumerate(token_ids) if texts[token_id] != ""), len(token_ids))
            begins.append((stream, token_ids[:end], True))
        for place, (stream, begin, _), pieces in zip(places, begins, self._windows.decode(begins), strict=True):
            if pieces is None:
                continue
            if stream.held:  # what a window holds only a window could finish; bytes also know whether it can be
                stream.held = False
                _, stream.pending = take_utf8(b"", self._table.raw(begin[-1]))
                pieces[-1] += "" if stream.pending else REPLACEMENT
            _, token_ids, per_token = chunks[place]
            texts = self._shown if stream.skip_special else self._texts
            pieces += self._many(stream, token_ids[len(begin) :], texts, per_token)
            out[place] = pieces if per_token else ["".join(pieces)]

    def _many(self, stream: TextStream, token_ids: list[int], texts: list[str | None], per_token: bool) -> list[str]:
        parts = self._table.parts
        pending = stream.pending
        if not per_token:
            data = b"".join([parts[i] if (text := texts[i]) is None else text.encode() for i in token_ids])
            text, stream.pending = take_utf8(pending, data)
            return [text]
        pieces: list[str] = []
        for token_id in token_ids:
            known = texts[token_id]
            if known is not None and not pending:
                pieces.append(known)
                continue
            piece, pending = take_utf8(pending, parts[token_id] if known is None else known.encode())
            pieces.append(piece)
        stream.pending = pending
        return pieces
