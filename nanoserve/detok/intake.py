"""What batches say becomes one row of work per request: absolute indices, lost states, engines that come and go. Pure.

Owned by `DetokManager`, called once per drain before the decode. A repeat is dropped, a gap (an evicted state, a
restart, a lost message) is a word to the engine and never wrong text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from nanoserve.detok.emit import Columns, Row
from nanoserve.detok.logprobs import ScoreLine, prompt_entries
from nanoserve.detok.state import RequestState, StateTable
from nanoserve.detok.stop_strings import make_matcher
from nanoserve.detok.vocabulary import Vocabulary
from nanoserve.ipc.columns import unpack_ids
from nanoserve.ipc.ids import api_index
from nanoserve.ipc.messages import (
    EmitMode,
    EngineStats,
    Finished,
    FinishReason,
    Opened,
    PromptLogprobs,
    PromptTokenTexts,
    RowLogprobs,
    TextSpec,
    TokenBatch,
)


@dataclass(slots=True)
class Drain:
    """The work of one call of `DetokManager.process`."""

    last: TokenBatch  # the newest batch of a living engine
    num_batches: int
    rows: dict[int, Row] = field(default_factory=dict)
    columns: defaultdict[int, Columns] = field(default_factory=lambda: defaultdict(Columns))
    resync: list[int] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)  # (request id, ids that count)
    broken: list[int] = field(default_factory=list)
    engine_stats: EngineStats | None = None
    oldest_ns: int = 0  # when the oldest batch that says so was sent
    suspect: bool = False  # some id may be outside the vocabulary


@dataclass(slots=True)
class Counters:
    """Counters of DetokStats; see there."""

    batches: int = 0
    tokens: int = 0
    decode_seconds: float = 0.0
    evictions: int = 0
    resyncs: int = 0
    late_rows: int = 0
    row_errors: int = 0
    stop_overrun_tokens: int = 0
    dropped_messages: int = 0


class Intake:
    """Opens states and fills rows. Shares the state table and the counters with the manager."""

    def __init__(self, vocabulary: Vocabulary | None, states: StateTable, counters: Counters) -> None:
        self._vocabulary = vocabulary
        self._states = states
        self._counters = counters
        self._engines: dict[int, int] = {}  # engine index -> incarnation
        self._all_awaited = False
        self._spec_decoder = msgspec.msgpack.Decoder(TextSpec)

    def await_all(self) -> None:
        """The engine has been asked for everything: no need to ask for single requests until it answers."""
        self._all_awaited = True

    def take(self, batches: Sequence[TokenBatch]) -> Drain | None:
        """Takes in all batches in order; None when none of them is from a living engine."""
        current = self._current(batches)
        if not current:
            return None
        drain = Drain(current[-1], len(current))
        drain.oldest_ns = min((batch.sent_ns for batch in current if batch.sent_ns), default=0)
        for batch in current:
            self._take_in(batch, drain)
        return drain

    def _current(self, batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        """The batches of engines that live. A new incarnation knows nothing of the old one's states, nor do we then."""
        for batch in batches:
            known = self._engines.get(batch.engine_index, 0)
            if batch.incarnation > known:
                self._engines[batch.engine_index] = batch.incarnation
                if known:
                    self._states.clear()
                    self._all_awaited = False
        current = [batch for batch in batches if batch.incarnation == self._engines[batch.engine_index]]
        self._counters.dropped_messages += len(batches) - len(current)
        return current

    def _take_in(self, batch: TokenBatch, drain: Drain) -> None:
        self._counters.batches += 1
        for accepted in batch.accepted:
            drain.columns[api_index(accepted.request_id)].accepted.append(accepted)
        for opened in batch.opened:
            self._open(opened, drain)
        token_ids = unpack_ids(batch.token_ids)
        if self._vocabulary is not None:
            drain.suspect |= self._vocabulary.lacks_any(token_ids)
        scores = {row.row: row for row in batch.logprobs} if batch.logprobs else None
        begin = place = 0
        rows, use = drain.rows, self._states.use
        for request_id, first_index, num_tokens in zip(
            batch.request_ids, batch.first_index, batch.num_tokens, strict=True
        ):
            own_ids = token_ids[begin : begin + num_tokens]
            begin += num_tokens
            own_scores = scores.get(place) if scores else None
            place += 1
            if request_id not in rows:
                state = use(request_id)
                if state is not None and first_index == state.num_tokens and own_scores is None:
                    rows[request_id] = Row(state, first_index, own_ids)
                    state.num_tokens += num_tokens
                    continue
            self._take_row(drain, request_id, first_index, own_ids, own_scores)
        for prompt in batch.prompt_logprobs:
            self._prompt_logprobs(prompt, drain)
        for finished in batch.finished:
            self._take_finished(drain, finished)
        if batch.stats is not None:
            drain.engine_stats = batch.stats

    def _open(self, opened: Opened, drain: Drain) -> None:
        """A new state, or one made again from all its ids: then its text is sent again and api drops what it has."""
        request_id = opened.request_id
        if self._states.ended_with_overrun(request_id) is not None:
            return  # ended here already, the engine is about to hear of it
        self._all_awaited = False
        failure = ""
        try:
            spec = self._spec_decoder.decode(opened.text_spec)
            token_ids = unpack_ids(opened.output_token_ids)
        except (msgspec.MsgspecError, ValueError):
            spec, token_ids, failure = TextSpec(), [], "The request's text options cannot be read."
        state = RequestState(request_id, api_index(request_id), spec, stream=None)
        vocabulary = self._vocabulary
        if vocabulary is not None and spec.detokenize:
            state.stream = vocabulary.decoder.open(spec.prompt_tail, skip_special=spec.skip_special_tokens)
            try:
                state.matcher = make_matcher(spec.stop, spec.stop_regex)
            except ValueError:
                failure = "The request's stop strings or patterns cannot be used."
            state.stop_tokens = vocabulary.stop_tokens(spec.stop)
            state.is_plain = state.matcher is None and spec.emit is EmitMode.STREAM and not failure
        self._states.put(state)
        row = drain.rows[request_id] = Row(state, 0, [], rebuilt=bool(token_ids), failure=failure)
        drain.suspect |= bool(token_ids)
        self._extend(row, token_ids, None)

    def _take_row(
        self, drain: Drain, request_id: int, first_index: int, token_ids: list[int], scores: RowLogprobs | None
    ) -> None:
        row = drain.rows.get(request_id)
        if row is None:
            state = self._states.use(request_id)
            if state is None:
                self._unknown_row(drain, request_id, len(token_ids))
                return
            row = drain.rows[request_id] = Row(state, state.num_tokens, [])
        have = row.state.num_tokens
        if first_index > have:
            self._forget_and_ask(drain, request_id)
            return
        if first_index < have:
            token_ids = token_ids[have - first_index :]
            if scores is not None:
                scores = _without_first(scores, have - first_index)
        self._extend(row, token_ids, scores)

    def _extend(self, row: Row, token_ids: list[int], scores: RowLogprobs | None) -> None:
        if not token_ids:
            return
        state = row.state
        if scores is not None and self._vocabulary is not None:
            if state.scores is None:
                names = self._vocabulary.names
                num_held, pending = names.unfinished(state.stream) if state.stream is not None else (0, b"")
                state.scores = ScoreLine(
                    names,
                    skip_special=state.spec.skip_special_tokens,
                    num_chars=state.sent_chars + len(state.held_back) + num_held,
                    pending=pending,
                )
            row.scores = [*(row.scores or ()), (len(row.token_ids), scores)]
        row.token_ids += token_ids
        state.num_tokens += len(token_ids)

    def _unknown_row(self, drain: Drain, request_id: int, num_tokens: int) -> None:
        overrun = self._states.ended_with_overrun(request_id)
        if overrun is None:
            self._forget_and_ask(drain, request_id)
        else:
            self._counters.late_rows += 1
            self._counters.stop_overrun_tokens += num_tokens * overrun

    def _forget_and_ask(self, drain: Drain, request_id: int) -> None:
        drain.rows.pop(request_id, None)
        if self._states.await_resync(request_id) and not self._all_awaited:
            drain.resync.append(request_id)
            self._counters.resyncs += 1

    def _prompt_logprobs(self, prompt: PromptLogprobs, drain: Drain) -> None:
        if self._vocabulary is None:
            return
        tokens = prompt_entries(self._vocabulary.names, unpack_ids(prompt.token_ids), prompt.scores)
        columns = drain.columns[api_index(prompt.request_id)]
        columns.prompt_logprobs.append(PromptTokenTexts(prompt.request_id, tokens))

    def _take_finished(self, drain: Drain, finished: Finished) -> None:
        request_id = finished.request_id
        if self._states.ended_with_overrun(request_id) is not None:
            self._states.end(request_id)  # the engine has heard of the end that we made
            return
        row = drain.rows.get(request_id)
        if row is None:
            state = self._states.use(request_id)
            if state is None:
                self._unknown_end(drain, finished)
                return
            row = drain.rows[request_id] = Row(state, state.num_tokens, [])
        if finished.reason.is_regular and not row.rebuilt and finished.num_output_tokens > row.state.num_tokens:
            self._forget_and_ask(drain, request_id)  # its last ids never came
            return
        row.finished = finished

    def _unknown_end(self, drain: Drain, finished: Finished) -> None:
        """The end of a request without a state: evicted, and then its held text is still due, or never opened."""
        if self._states.is_awaited(finished.request_id) or self._all_awaited:
            return  # comes again, after the ids
        if finished.num_output_tokens and finished.reason is not FinishReason.ERROR:
            self._forget_and_ask(drain, finished.request_id)
        else:
            drain.columns[api_index(finished.request_id)].end(finished)


def _without_first(scores: RowLogprobs, num: int) -> RowLogprobs:
    return RowLogprobs(
        scores.row, scores.logprobs[num:], scores.ranks[num:], scores.top_ids[num:], scores.top_logprobs[num:]
    )
