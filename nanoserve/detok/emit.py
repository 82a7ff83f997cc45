"""From released text to what a client may see: stop strings, hold-back, terminal records, one column set per api.

Pure; called by the detokenizer's manager once per request and drain, after the batch decode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

import msgspec

from nanoserve.detok.incremental import Decoder
from nanoserve.detok.logprobs import ScoreLine
from nanoserve.detok.state import RequestState
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import (
    Accepted,
    DetokStats,
    EmitMode,
    EngineStats,
    Failure,
    Finished,
    FinishReason,
    PromptTokenTexts,
    RowLogprobs,
    RowTokenTexts,
    TextBatch,
    TextFinished,
    TokenText,
)


@dataclass(slots=True)
class Row:
    """All that one drain brought for one request."""

    state: RequestState
    first_index: int
    token_ids: list[int]
    scores: list[tuple[int, RowLogprobs]] | None = None  # (position in token_ids, theirs from there)
    finished: Finished | None = None
    rebuilt: bool = False  # opened with all ids so far: nothing can be missing
    failure: str = ""
    stop_at: int = -1  # position in token_ids of a stop string that is one special token

    def take_ids(self) -> list[int]:
        """The ids to decode; sets `stop_at`. None after a stop token: what is held there must not depend on them."""
        token_ids = self.token_ids if self.finished is None else self.token_ids[: self.num_shown]
        stops, spec = self.state.stop_tokens, self.state.spec
        if stops:
            armed = range(max(0, spec.min_tokens - self.first_index), len(token_ids))
            self.stop_at = next((at for at in armed if token_ids[at] in stops), -1)
            if self.stop_at >= 0:
                return token_ids[: self.stop_at + spec.include_stop_str_in_output]
        return token_ids

    @property
    def num_shown(self) -> int:
        """Ids that are text: a final EOS or stop id is not, unless the request wants it."""
        end = self.finished
        hides = end is not None and end.stop_token_id is not None and not self.state.spec.include_stop_str_in_output
        return len(self.token_ids) - 1 if hides and self.token_ids else len(self.token_ids)

    @property
    def per_token(self) -> bool:
        state = self.state
        return bool(state.matcher or state.stop_tokens or self.scores)


@dataclass(slots=True)
class Emission:
    """What goes to api for one row, and how the request ended, if it did."""

    delta: str
    char_offset: int
    token_ids: list[int]
    finished: TextFinished | None = None
    num_overrun: int = 0
    entries: list[TokenText] = field(default_factory=list)
    entries_first: int = 0


class Columns:
    """A TextBatch in the making, for one api process."""

    def __init__(self) -> None:
        self.accepted: list[Accepted] = []
        self.prompt_logprobs: list[PromptTokenTexts] = []
        self._request_ids: list[int] = []
        self._deltas: list[str] = []
        self._char_offset: list[int] = []
        self._first_index: list[int] = []
        self._num_tokens: list[int] = []
        self._token_ids: list[int] = []
        self._logprobs: list[RowTokenTexts] = []
        self._finished: list[TextFinished] = []

    def add(self, row: Row, emission: Emission) -> None:
        token_ids = emission.token_ids
        if token_ids or emission.delta or emission.entries:
            if emission.entries:
                place = len(self._request_ids)
                self._logprobs.append(RowTokenTexts(place, emission.entries, emission.entries_first))
            self._request_ids.append(row.state.request_id)
            self._deltas.append(emission.delta)
            self._char_offset.append(emission.char_offset)
            self._first_index.append(row.first_index)
            self._num_tokens.append(len(token_ids))
            self._token_ids += token_ids
        if emission.finished is not None:
            self._finished.append(emission.finished)

    def add_plain(self, rows: list[Row], deltas: list[str]) -> None:
        """The rows of plain streams that go on, all at once: this is nearly every row of nearly every step."""
        states = [row.state for row in rows]
        self._request_ids += [state.request_id for state in states]
        self._deltas += deltas
        self._char_offset += [state.sent_chars for state in states]
        self._first_index += [row.first_index for row in rows]
        self._num_tokens += [len(row.token_ids) for row in rows]
        self._token_ids += chain.from_iterable([row.token_ids for row in rows])
        for state, delta in zip(states, deltas, strict=True):
            state.sent_chars += len(delta)

    def end(self, finished: Finished) -> None:
        """A terminal record of a request that has no text here."""
        self._finished.append(TextFinished(finished))

    def batch(
        self,
        detok: tuple[int, int],
        engine: tuple[int, int, int],
        engine_stats: EngineStats | None,
        detok_stats: DetokStats,
    ) -> TextBatch:
        """The message; `detok` is (index, incarnation), `engine` is (index, incarnation, step)."""
        return TextBatch(
            *detok,
            *engine,
            request_ids=self._request_ids,
            deltas=self._deltas,
            char_offset=self._char_offset,
            first_index=self._first_index,
            num_tokens=self._num_tokens,
            token_ids=pack_ids(self._token_ids),
            accepted=self.accepted,
            logprobs=self._logprobs,
            prompt_logprobs=self.prompt_logprobs,
            finished=self._finished,
            engine_stats=engine_stats,
            detok_stats=detok_stats,
        )


def emit(row: Row, pieces: list[str], decoder: Decoder | None, *, was_head: bool) -> Emission:
    """Advances one request by one row. `pieces` are the decoder's, one per shown id where `row.per_token`.

    `was_head` says that the first piece begins the text, so that its token may have other bytes than elsewhere.
    `decoder` is None for requests that want ids only.
    """
    state = row.state
    stop: str | None = None
    kept = len(row.token_ids)
    if row.per_token:
        text, kept, stop = _scan(row, pieces, decoder, was_head)
    else:
        text = pieces[0]
    ended = stop is not None or row.finished is not None
    if stop is None:
        if state.matcher is not None:
            text = state.held_back + text
            held = 0 if ended or state.spec.include_stop_str_in_output else state.matcher.held
            state.held_back = text[len(text) - held :]
            text = text[: len(text) - held]
        if ended:
            text += _flush(state, decoder)
    char_offset = state.sent_chars
    state.sent_chars += len(text)
    if state.spec.emit is EmitMode.FINAL:
        state.parts.append(text)
        text, char_offset = ("".join(state.parts), 0) if ended else ("", 0)
    emission = Emission(text, char_offset, row.token_ids[:kept])
    if stop is not None:
        emission.num_overrun = len(row.token_ids) - kept
        emission.finished = TextFinished(_stopped(row, row.first_index + kept), stop_string=stop)
    elif row.finished is not None:
        emission.finished = TextFinished(row.finished)
    if state.scores is not None:
        taken = state.scores.cut(state.sent_chars) if ended else state.scores.take(state.sent_chars)
        emission.entries_first, emission.entries = taken
    return emission


def _scan(row: Row, pieces: list[str], decoder: Decoder | None, was_head: bool) -> tuple[str, int, str | None]:
    """Token by token: logprob entries, stop tokens, stop strings.

    Returns the text up to the stop string (or all of it), how many ids count, and which stop string fired.
    """
    state = row.state
    spec = state.spec
    matcher = state.matcher
    scores = _scores_of(row)
    text = ""
    for at, token_id in enumerate(row.token_ids):
        shown = at < len(pieces)
        piece = pieces[at] if shown else ""
        armed = row.first_index + at + 1 > spec.min_tokens
        if scores is not None and state.scores is not None:
            _add_score(state.scores, scores[at], token_id, row.first_index + at, piece, shown, was_head and not text)
        if at == row.stop_at:
            return state.held_back + text + piece + _flush(state, decoder), at + 1, state.stop_tokens[token_id]
        hit = matcher.scan(piece, armed=armed) if matcher is not None and piece else None
        if hit is not None:
            text = state.held_back + text + piece[: hit.end]
            if not spec.include_stop_str_in_output:
                text = text[: len(text) - hit.length]
            return text, at + 1, hit.stop
        text += piece
    return text, len(row.token_ids), None


def _flush(state: RequestState, decoder: Decoder | None) -> str:
    return decoder.flush(state.stream) if decoder is not None and state.stream is not None else ""


def _scores_of(row: Row) -> list[tuple[RowLogprobs, int] | None] | None:
    """Per id of the row: whose scores, and at which place in them; None for a row without any."""
    if not row.scores:
        return None
    found: list[tuple[RowLogprobs, int] | None] = [None] * len(row.token_ids)
    for begin, scores in row.scores:
        for at in range(min(len(scores.logprobs), len(found) - begin)):
            found[begin + at] = (scores, at)
    return found


def _add_score(
    line: ScoreLine,
    scored: tuple[RowLogprobs, int] | None,
    token_id: int,
    index: int,
    piece: str,
    shown: bool,
    at_head: bool,
) -> None:
    if scored is None:
        line.skip(token_id, piece, at_head=at_head)
    else:
        line.add(token_id, *scored, index=index, piece=piece, at_head=at_head, hidden=not shown)


def _stopped(row: Row, num_kept: int) -> Finished:
    """The terminal record of a request that a stop string ended: the engine's own numbers where they are here."""
    if row.finished is None:
        return Finished(row.state.request_id, FinishReason.STOP, num_output_tokens=num_kept)
    return msgspec.structs.replace(
        row.finished,
        reason=FinishReason.STOP,
        num_output_tokens=num_kept,
        stop_token_id=None,
        is_eos=False,
        failure=None,
    )


def failed(row: Row) -> Emission:
    """The end of a request whose ids cannot be made text: its own fault, not its neighbours'."""
    failure = Failure(500, row.failure, error_type="server_error")
    num_prompt_tokens = row.finished.num_prompt_tokens if row.finished is not None else 0
    end = Finished(
        row.state.request_id,
        FinishReason.ERROR,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=row.first_index,
        failure=failure,
    )
    return Emission("", row.state.sent_chars, [], TextFinished(end))
