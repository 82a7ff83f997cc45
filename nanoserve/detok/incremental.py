"""Ids to text a few at a time, for any tokenizer: the window decoder. Pure; called by the detokenizer's manager.

Right is (ADR 0004) one decode of all output ids, given the prompt's tail as left context, for every chunking. The
window rule is the one of TGI, vLLM and SGLang: keep a few ids as left context (`surr`), decode them with and without
the new ids (`read`), and release the difference. What differs here:

* Only the last U+FFFD of a decode can still become a character (every earlier one has been judged by a byte after
  it), so only that one is held and all text before it is released at once. What is held is a character, not tokens:
  a window that garbage has made long is cut back to `_CONTEXT` ids and no text is given up.
* The left context is the ids since the text last ended in a whole character, mostly one; at most `_CONTEXT` of them,
  because four bytes decide how any UTF-8 goes on, and every id in a window has at least one.
* Skipped special ids and ids without a token never enter a window.
* `<0xNN>` byte tokens (SentencePiece) never enter a window either: their runs are decoded here, character by
  character, because `tokenizers` spoils a whole run, sent characters included, for one bad byte in it (ADR 0004).

All rows of one drain cost two batch decodes, and the first one is mostly empty: how long the text of a context is, is
known from the last step or from any stream that had the same context. What one token says after another one is
remembered too (in bounded memory), which spares the other decode for the pairs of tokens that are most of any text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from nanoserve.tokenizer import Tokenizer

_CONTEXT = 4
_MAX_WINDOW = 12
_MAX_MEMO = 65536
_UNKNOWN = -1
_GO_ON = -1  # in place of a surr row: the text of the last read row
_NOTHING = -2  # in place of a surr row: there is no left context
# Errors that no tokenizer raised. Everything else may be its own: a panic of `tokenizers`' Rust code is no Exception.
NOT_A_TOKENIZERS = (KeyboardInterrupt, SystemExit, GeneratorExit)
REPLACEMENT = "\ufffd"


@dataclass(slots=True)
class TextStream:
    """Decoding state of one request: O(window), whatever its length."""

    skip_special: bool
    context: list[int]  # ids[surr_offset:read_offset]; empty only before the first token without a prompt's tail
    clean: int = 0  # context[:clean] ended in a whole character and is dropped when the text does so again
    context_chars: int = _UNKNOWN  # released characters of decode(context), when they are known
    held: bool = False  # the text ends in a U+FFFD that may become a character
    pending: bytes = b""  # bytes of an unfinished character


Chunk: TypeAlias = tuple[TextStream, list[int], bool]
"""New ids of one stream; True asks for one piece of text per id instead of one for all. (A plain tuple: it is made
for every row of every step, and a named one costs six times as much.)"""


class Decoder(Protocol):
    """Ids to text for many streams at once. Ids must be inside the vocabulary."""

    def open(self, prompt_tail: Sequence[int], *, skip_special: bool) -> TextStream: ...

    def decode(self, chunks: Sequence[Chunk]) -> list[list[str] | None]:
        """Released text per chunk (one piece, or one per id); None where the tokenizer failed on that chunk."""
        ...

    def flush(self, stream: TextStream) -> str:
        """What is still held, at the end of the stream: U+FFFD or nothing."""
        ...


def take_utf8(pending: bytes, data: bytes) -> tuple[str, bytes]:
    """Decodes all that is certain; returns it and the (at most three) bytes of an unfinished character.

    Invalid bytes become one U+FFFD per maximal ill-formed part (Unicode 3.9, "U+FFFD substitution"), as in Rust's
    lossy decode, which `tokenizers` uses, and in Python's errors="replace".
    """
    data = pending + data
    text, consumed = codecs.utf_8_decode(data, "replace", False)
    rest = data[consumed:]
    if len(rest) == 2 and rest[0] == 0xED and rest[1] >= 0xA0:
        # Half of a surrogate: Python waits for the third byte (for "surrogatepass"), yet no byte can save it.
        return text + REPLACEMENT * 2, b""
    return text, rest


@dataclass(slots=True)
class _Job:
    """The text tokens of one chunk: context + new ids, and the places where a piece of text ends."""

    stream: TextStream
    ids: list[int]
    base: int  # ids[:base] is context
    cuts: list[int] = field(default_factory=list)  # ends, as indices into ids
    sinks: list[int] = field(default_factory=list)  # index of the piece that each cut fills
    pieces: list[str] = field(default_factory=list)
    rows: list[tuple[int, int]] = field(default_factory=list)  # (surr row, read row)
    start: int = 0  # where the last window begins
    per_token: bool = False


class WindowDecoder:
    """Any tokenizer, through its batch decode alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.num_cuts = 0  # windows without a whole character at their end that became too long
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids
        self._byte_values = _byte_tokens(tokenizer)
        # With byte tokens apart, U+FFFD from a text token is a token that says U+FFFD: nothing to wait for.
        self._holds = not self._byte_values
        void = (i for i in range(tokenizer.vocab_size) if not tokenizer.id_to_token(i))
        self._apart = frozenset(void) | frozenset(self._byte_values)
        self._apart_or_special = self._apart | self._special
        self._anchor = find_anchor(tokenizer, self._apart_or_special)
        self._memo: dict[int | tuple[int, ...], int] = {}  # context -> its certain characters
        self._pairs: dict[int | tuple[int, ...], str] = {}  # whole context and new token -> its text, where whole too
        space = next((token_id for token_id, byte in self._byte_values.items() if byte == 0x20), None)
        self._strips_first_space = space is not None and self._text([space]) == ""

    def open(self, prompt_tail: Sequence[int], *, skip_special: bool) -> TextStream:
        """A stream whose left context is the prompt's tail up to its last whole character."""
        apart = self._apart_or_special if skip_special else self._apart
        context = [token_id for token_id in prompt_tail if token_id not in apart and token_id >= 0]
        if self._holds:
            while context and ((text := self._text(context)) is None or text.endswith(REPLACEMENT)):
                context.pop()
        if not context and any(token_id in self._byte_values for token_id in prompt_tail):
            context = list(self._anchor)  # there was text, only none that can stand in a window
        return TextStream(skip_special=skip_special, context=context, clean=len(context))

    def decode(self, chunks: Sequence[Chunk]) -> list[list[str] | None]:
        out: list[list[str] | None] = [None] * len(chunks)
        surr_rows: list[list[int]] = []
        read_rows: list[list[int]] = []
        steps: list[tuple[int, TextStream, int]] = []  # (place, stream, characters of its context, or ~surr row)
        others: list[int] = []
        apart, apart_or_special, memo, pairs = self._apart, self._apart_or_special, self._memo, self._pairs
        for place, (stream, token_ids, per_token) in enumerate(chunks):
            context = stream.context
            aside = apart_or_special if stream.skip_special else apart
            single = len(token_ids) == 1
            if (
                not context
                or stream.pending
                or not (
                    token_ids[0] not in aside if single else not per_token and token_ids and aside.isdisjoint(token_ids)
                )
            ):
                others.append(place)
                continue
            # Text tokens alone, mostly one, as in nearly every row of nearly every step.
            chars = stream.context_chars
            if single and stream.clean == len(context):
                known = pairs.get(_pair(context + token_ids) if stream.clean > 1 else context[0] << 32 | token_ids[0])
                if known is not None:
                    out[place] = [known]
                    stream.context, stream.clean, stream.context_chars = token_ids, 1, _UNKNOWN
                    continue
            if chars < 0:
                chars = memo.get(context[0] if len(context) == 1 else tuple(context), _UNKNOWN)
                if chars < 0:
                    chars = ~len(surr_rows)
                    surr_rows.append(context)
            steps.append((place, stream, chars))
            read_rows.append(context + token_ids)
        jobs = [(place, self._plan(chunks[place])) for place in others]
        for _, job in jobs:
            self._lay_windows(job, surr_rows, read_rows)
        surr_texts = self._texts(surr_rows)
        read_texts = self._texts(read_rows)
        self._remember(surr_rows, surr_texts)
        self._finish_steps(out, steps, surr_texts, read_texts, read_rows)
        for place, job in jobs:
            out[place] = self._finish(job, surr_texts, read_texts)
        return out

    def _finish_steps(
        self,
        out: list[list[str] | None],
        steps: list[tuple[int, TextStream, int]],
        surr_texts: list[str | None],
        read_texts: list[str | None],
        windows: list[list[int]],
    ) -> None:
        """The rows that are one window each; they are the first of `read_texts` and `windows`."""
        holds, pairs = self._holds, self._pairs
        for (place, stream, chars), text, window in zip(steps, read_texts, windows, strict=False):
            if chars < 0:
                before = surr_texts[~chars]
                if before is None:
                    continue
                chars = len(self._certain(before))
            if text is None:
                continue
            if holds and text[-1:] == REPLACEMENT:
                out[place] = [text[chars:-1]]
                self._grow(stream, window, max(chars, len(text) - 1))
                continue
            out[place] = [text[chars:]]
            if stream.clean == len(window) - 1:
                pairs[_pair(window)] = text[chars:]
                stream.context, stream.clean, stream.context_chars = window[-1:], 1, _UNKNOWN
            else:
                _begin_anew(stream, window)

    def flush(self, stream: TextStream) -> str:
        left = stream.held or bool(stream.pending)
        stream.held, stream.pending = False, b""
        return REPLACEMENT if left else ""

    def _plan(self, chunk: Chunk) -> _Job:
        """Splits a chunk into what goes through windows and what does not, keeping the order of the text."""
        stream, token_ids, per_token = chunk
        job = _Job(stream, list(stream.context), len(stream.context), per_token=per_token)
        apart = self._apart_or_special if stream.skip_special else self._apart
        if not stream.pending and apart.isdisjoint(token_ids):
            job.ids += token_ids
            job.cuts = list(range(job.base + 1, len(job.ids) + 1)) if per_token else [len(job.ids)] * bool(token_ids)
            job.pieces = [""] * (len(job.cuts) or (not per_token))
            job.sinks = list(range(len(job.cuts)))
            return job
        for token_id in token_ids:
            job.pieces.append("")
            if token_id in self._byte_values:
                job.pieces[-1] = self._take_byte(job, token_id)
            elif token_id not in apart:
                if stream.pending:  # a character that no further byte can finish
                    job.pieces[-1] = REPLACEMENT
                    stream.pending = b""
                job.ids.append(token_id)
                job.cuts.append(len(job.ids))
                job.sinks.append(len(job.pieces) - 1)
        if not per_token:
            _join_cuts(job)
        return job

    def _lay_windows(self, job: _Job, surr_rows: list[list[int]], read_rows: list[list[int]]) -> None:
        """Turns cuts into rows to decode. A window that has become long starts again `_CONTEXT` ids before the cut."""
        begin = job.base
        stream = job.stream
        if stream.context_chars == _UNKNOWN and stream.context:
            key = stream.context[0] if len(stream.context) == 1 else tuple(stream.context)
            stream.context_chars = self._memo.get(key, _UNKNOWN)
        for i, cut in enumerate(job.cuts):
            surr = _GO_ON
            if i == 0:
                fresh = stream.context_chars == _UNKNOWN
            else:
                fresh = cut - job.start > _MAX_WINDOW
                if fresh:
                    job.start = max(0, begin - _CONTEXT)
            if fresh and begin == job.start:
                surr = _NOTHING
            elif fresh:
                surr = len(surr_rows)
                surr_rows.append(job.ids[job.start : begin])
            job.rows.append((surr, len(read_rows)))
            read_rows.append(job.ids[job.start : cut])
            begin = cut

    def _take_byte(self, job: _Job, token_id: int) -> str:
        stream = job.stream
        value = self._byte_values[token_id]
        if not job.ids:  # the first text of all: from here on no token is the first one
            job.ids += self._anchor
            job.base = len(job.ids)
            stream.context, stream.clean, stream.context_chars = list(self._anchor), len(self._anchor), _UNKNOWN
            if value == 0x20 and self._strips_first_space:
                return ""
        text, stream.pending = take_utf8(stream.pending, bytes((value,)))
        return text

    def _finish(self, job: _Job, surr_texts: list[str | None], read_texts: list[str | None]) -> list[str] | None:
        stream = job.stream
        chars = stream.context_chars
        text: str | None = ""
        for (surr, read), sink in zip(job.rows, job.sinks, strict=True):
            if surr == _NOTHING:
                chars = 0
            elif surr != _GO_ON:
                before = surr_texts[surr]
                chars = _UNKNOWN if before is None else len(self._certain(before))
            text = read_texts[read]
            if text is None or chars == _UNKNOWN:
                return None
            certain = self._certain(text)
            job.pieces[sink] += certain[chars:]
            chars = max(chars, len(certain))  # what was released stays released
        if job.rows and text is not None:
            window = job.ids[job.start :]
            if self._holds and text.endswith(REPLACEMENT):
                stream.clean = max(0, stream.clean - job.start)
                self._grow(stream, window, chars)
            else:
                _begin_anew(stream, job.ids)
        return job.pieces if job.per_token else ["".join(job.pieces)]

    def _grow(self, stream: TextStream, window: list[int], chars: int) -> None:
        """The text ends inside a character, or in an invalid one: the window stays, and is cut when it is long."""
        stream.held = True
        if len(window) > _MAX_WINDOW:
            self.num_cuts += 1
            stream.context, stream.clean, stream.context_chars = window[-_CONTEXT:], 0, _UNKNOWN
        else:
            stream.context, stream.context_chars = window, chars

    def _remember(self, surr_rows: list[list[int]], surr_texts: list[str | None]) -> None:
        """Contexts come back: a handful of tokens is most of any text."""
        if len(self._memo) > _MAX_MEMO:
            self._memo.clear()
        if len(self._pairs) > _MAX_MEMO:
            self._pairs.clear()
        for row, text in zip(surr_rows, surr_texts, strict=True):
            if text is not None and len(row) <= _CONTEXT:
                self._memo[row[0] if len(row) == 1 else tuple(row)] = len(self._certain(text))

    def _certain(self, text: str) -> str:
        return text[:-1] if self._holds and text.endswith(REPLACEMENT) else text

    def _texts(self, rows: list[list[int]]) -> list[str | None]:
        """One batch decode. When it fails, row by row, so that one bad row does not take the others with it."""
        if not rows:
            return []
        try:
            return list(self._decode(rows))
        except NOT_A_TOKENIZERS:
            raise
        except BaseException:  # whatever a tokenizer raises, it is that row's fault alone
            return [self._text(row) for row in rows]

    def _text(self, row: list[int]) -> str | None:
        return decode_or_none(self._tokenizer, row)

    def _decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return self._tokenizer.decode_batch(rows, skip_special_tokens=False)


def _pair(window: list[int]) -> int | tuple[int, ...]:
    """A context and the id after it as a key; two ids are one number, which costs half."""
    return window[0] << 32 | window[1] if len(window) == 2 else tuple(window)


def _begin_anew(stream: TextStream, window: list[int]) -> None:
    """The text ends in a whole character: what came since the last such place is context enough."""
    context = window[max(stream.clean, len(window) - _CONTEXT) :]
    stream.held = False
    stream.context, stream.clean, stream.context_chars = context, len(context), _UNKNOWN


def _join_cuts(job: _Job) -> None:
    """One piece for the whole chunk: neighbouring pieces of the windows become one cut.

    Text and byte pieces alternate, so the pieces are kept in order and only joined at the end; a cut can go when
    the next piece comes from the same run of text tokens.
    """
    keep = [
        i
        for i, sink in enumerate(job.sinks)
        if i + 1 == len(job.sinks) or job.sinks[i + 1] != sink + 1 or job.pieces[sink + 1]
    ]
    job.cuts = [job.cuts[i] for i in keep]
    job.sinks = [job.sinks[i] for i in keep]


def _byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Id to byte value of the `<0xNN>` tokens, if this tokenizer's decode takes them for bytes."""
    ids = {value: tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    probe, known = "é", [ids[byte] for byte in "é".encode()]
    if None in known:
        probe, known = "A", [ids[0x41]]
    if None in known or tokenizer.decode([i for i in known if i is not None], skip_special_tokens=False) != probe:
        return {}
    return {token_id: value for value, token_id in ids.items() if token_id is not None}


def decode_or_none(tokenizer: Tokenizer, row: Sequence[int]) -> str | None:
    """The text of one row; None where the tokenizer fails on it, whatever it raises."""
    try:
        return tokenizer.decode_batch([row], skip_special_tokens=False)[0]
    except NOT_A_TOKENIZERS:
        raise
    except BaseException:
        return None


def find_anchor(tokenizer: Tokenizer, apart: frozenset[int]) -> list[int]:
    """An ordinary token with plain text, to stand for "there was text before"; empty when there is none."""
    candidates = [*tokenizer.encode("a", add_special_tokens=False), *range(min(tokenizer.vocab_size, 4096))]
    for token_id in candidates:
        if token_id in apart:
            continue
        text = decode_or_none(tokenizer, [token_id])
        if text is not None and text.isascii() and text.strip().isalnum():
            return [token_id]
    return []
