"""The detokenizer without its sockets: token batches in, text batches and words for the engine out. Pure.

Owner: the detokenizer process (and `nanoserve.LLM`, in its own). A call takes all batches that wait, so that a
detokenizer that lags decodes longer pieces instead of a longer queue. In order: take in rows by their absolute index
(repeats are dropped, a gap means Resync), decode all of them at once, then stop strings and columns per api process.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from nanoserve.config import DetokConfig
from nanoserve.detok.byte_decoder import ByteDecoder
from nanoserve.detok.emit import Columns, Row, emit, failed
from nanoserve.detok.incremental import Chunk, Decoder, WindowDecoder
from nanoserve.detok.logprobs import ScoreLine, TokenNames, prompt_entries
from nanoserve.detok.state import RequestState, StateTable
from nanoserve.detok.stop_strings import StopMatcher
from nanoserve.detok.token_table import TokenTable, build_table
from nanoserve.errors import StartupError
from nanoserve.ipc.columns import unpack_ids
from nanoserve.ipc.ids import api_index
from nanoserve.ipc.messages import (
    AbortCause,
    AbortRequest,
    DetokStats,
    EngineStats,
    Finished,
    FinishReason,
    Opened,
    PromptLogprobs,
    PromptTokenTexts,
    Resync,
    RowLogprobs,
    TextBatch,
    TextSpec,
    TokenBatch,
)
from nanoserve.tokenizer import Tokenizer


@dataclass(slots=True)
class DetokOutput:
    """What one drain says: at most one message per api process, and what the engine must hear."""

    text_batches: dict[int, TextBatch] = field(default_factory=dict)  # by api index
    to_engine: list[AbortRequest | Resync] = field(default_factory=list)


@dataclass(slots=True)
class _Drain:
    """The work of one call of `process`."""

    rows: dict[int, Row] = field(default_factory=dict)
    columns: defaultdict[int, Columns] = field(default_factory=lambda: defaultdict(Columns))
    resync: list[int] = field(default_factory=list)
    stopped: list[tuple[int, int]] = field(default_factory=list)  # (request id, ids that count)
    broken: list[int] = field(default_factory=list)
    engine_stats: EngineStats | None = None
    suspect: bool = False  # some id may be outside the vocabulary


@dataclass(slots=True)
class _Counters:
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


class _Text:
    """Everything that depends on the tokenizer; without one (`--skip-tokenizer-init`) there is none of it."""

    def __init__(self, tokenizer: Tokenizer, mode: str, table: TokenTable | None) -> None:
        windows = WindowDecoder(tokenizer)
        if mode == "bytes" and table is None:
            raise StartupError("--detokenizer bytes: this tokenizer's text is not the bytes of its tokens joined")
        self.tokenizer = tokenizer
        self.decoder: Decoder = windows if mode == "window" or table is None else ByteDecoder(table, windows)
        self.names = TokenNames(tokenizer, table, windows)
        self.vocab_size = tokenizer.vocab_size


class DetokManager:
    """Owns the states. One instance, one thread."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: DetokConfig,
        *,
        detok_index: int = 0,
        incarnation: int = 1,
        num_apis: int = 1,
        clock: Callable[[], int] = time.monotonic_ns,
        table: TokenTable | Literal["build"] | None = "build",
    ) -> None:
        """`table` is the proved token table or None where there is none; it is built here unless it is given.

        `tokenizer` None is ids only. `clock` gives nanoseconds of CLOCK_MONOTONIC. Raises StartupError when
        `--detokenizer bytes` is asked of a tokenizer for which it is not proved.
        """
        self._text: _Text | None = None
        if tokenizer is not None:
            proved = build_table(tokenizer) if table == "build" else table
            self._text = _Text(tokenizer, config.detokenizer, proved)
        self._states = StateTable(config.detok_max_states)
        self._identity = (detok_index, incarnation)
        self._num_apis = num_apis
        self._clock = clock
        self._counters = _Counters()
        self._engines: dict[int, int] = {}  # engine index -> incarnation
        self._all_awaited = False
        self._spec_decoder = msgspec.msgpack.Decoder(TextSpec)

    def resync_all(self) -> Resync:
        """The first word of a detokenizer that took another's place."""
        self._all_awaited = True
        return Resync(request_ids=[], detok_index=self._identity[0])

    @property
    def num_states(self) -> int:
        return len(self._states)

    @property
    def num_tracked(self) -> int:
        """States and everything else that is remembered of requests; 0 when nothing lives."""
        return len(self._states) + self._states.num_ended + self._states.num_awaited

    @property
    def decoder_name(self) -> str:
        """What ids become text by: "bytes", "window", or "none"."""
        if self._text is None:
            return "none"
        return "bytes" if isinstance(self._text.decoder, ByteDecoder) else "window"

    def process(self, batches: Sequence[TokenBatch]) -> DetokOutput:
        """One drain. Never raises for what a batch says; a row that cannot be decoded ends that request alone."""
        current = self._current(batches)
        if not current:
            return DetokOutput()
        drain = _Drain()
        for batch in current:
            self._take_in(batch, drain)
        self._advance(drain)
        self._counters.evictions += self._states.evict()
        return self._output(current, drain)

    # ---- taking in ---------------------------------------------------------------------------------------

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

    def _take_in(self, batch: TokenBatch, drain: _Drain) -> None:
        self._counters.batches += 1
        for accepted in batch.accepted:
            drain.columns[api_index(accepted.request_id)].accepted.append(accepted)
        for opened in batch.opened:
            self._open(opened, drain)
        token_ids = unpack_ids(batch.token_ids)
        if token_ids and self._text is not None:
            drain.suspect |= min(token_ids) < 0 or max(token_ids) >= self._text.vocab_size
        scores = {row.row: row for row in batch.logprobs} if batch.logprobs else None
        begin = 0
        for place, request_id in enumerate(batch.request_ids):
            end = begin + batch.num_tokens[place]
            own = scores.get(place) if scores else None
            self._take_row(drain, request_id, batch.first_index[place], token_ids[begin:end], own)
            begin = end
        for prompt in batch.prompt_logprobs:
            self._prompt_logprobs(prompt, drain)
        for finished in batch.finished:
            self._take_finished(drain, finished)
        if batch.stats is not None:
            drain.engine_stats = batch.stats

    def _open(self, opened: Opened, drain: _Drain) -> None:
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
        state = RequestState(request_id, spec, stream=None)
        text = self._text
        if text is not None and spec.detokenize:
            state.stream = text.decoder.open(spec.prompt_tail, skip_special=spec.skip_special_tokens)
            if spec.stop:
                state.matcher = StopMatcher(spec.stop)
                state.stop_tokens = self._stop_tokens(spec.stop)
        self._states.put(state)
        row = drain.rows[request_id] = Row(state, 0, rebuilt=bool(token_ids), failure=failure)
        drain.suspect |= bool(token_ids)
        self._extend(row, token_ids, None)

    def _stop_tokens(self, stops: tuple[str, ...]) -> dict[int, str]:
        """Stop strings that are the name of one special token, which the text may never show."""
        assert self._text is not None
        tokenizer = self._text.tokenizer
        ids = {stop: tokenizer.token_to_id(stop) for stop in stops}
        return {i: stop for stop, i in ids.items() if i is not None and i in tokenizer.special_ids}

    def _take_row(
        self, drain: _Drain, request_id: int, first_index: int, token_ids: list[int], scores: RowLogprobs | None
    ) -> None:
        row = drain.rows.get(request_id)
        if row is None:
            state = self._states.use(request_id)
            if state is None:
                self._unknown_row(drain, request_id, len(token_ids))
                return
            row = drain.rows[request_id] = Row(state, state.num_tokens)
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
        if scores is not None and self._text is not None:
            if state.scores is None:
                state.scores = ScoreLine(self._text.names, skip_special=state.spec.skip_special_tokens)
            row.scores.append((len(row.token_ids), scores))
        row.token_ids += token_ids
        state.num_tokens += len(token_ids)

    def _unknown_row(self, drain: _Drain, request_id: int, num_tokens: int) -> None:
        overrun = self._states.ended_with_overrun(request_id)
        if overrun is None:
            self._forget_and_ask(drain, request_id)
        else:
            self._counters.late_rows += 1
            self._counters.stop_overrun_tokens += num_tokens * overrun

    def _forget_and_ask(self, drain: _Drain, request_id: int) -> None:
        drain.rows.pop(request_id, None)
        if self._states.await_resync(request_id) and not self._all_awaited:
            drain.resync.append(request_id)
            self._counters.resyncs += 1

    def _prompt_logprobs(self, prompt: PromptLogprobs, drain: _Drain) -> None:
        if self._text is None:
            return
        tokens = prompt_entries(self._text.names, unpack_ids(prompt.token_ids), prompt.scores)
        columns = drain.columns[api_index(prompt.request_id)]
        columns.prompt_logprobs.append(PromptTokenTexts(prompt.request_id, tokens))

    def _take_finished(self, drain: _Drain, finished: Finished) -> None:
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
            row = drain.rows[request_id] = Row(state, state.num_tokens)
        regular = finished.reason in (FinishReason.STOP, FinishReason.LENGTH)
        if regular and not row.rebuilt and finished.num_output_tokens > row.state.num_tokens:
            self._forget_and_ask(drain, request_id)  # its last ids never came
            return
        row.finished = finished

    def _unknown_end(self, drain: _Drain, finished: Finished) -> None:
        """The end of a request without a state: evicted, and then its held text is still due, or never opened."""
        if self._states.is_awaited(finished.request_id) or self._all_awaited:
            return  # comes again, after the ids
        if finished.num_output_tokens and finished.reason is not FinishReason.ERROR:
            self._forget_and_ask(drain, finished.request_id)
        else:
            drain.columns[api_index(finished.request_id)].end(finished)

    # ---- making text -------------------------------------------------------------------------------------

    def _advance(self, drain: _Drain) -> None:
        rows = list(drain.rows.values())
        chunks: list[Chunk] = []
        heads: list[bool] = []
        for row in rows:
            stream = row.state.stream
            if stream is None or row.failure:
                continue
            token_ids = row.token_ids if row.finished is None else row.token_ids[: row.num_shown]
            if drain.suspect and self._has_unknown(token_ids):
                row.failure = "The model made a token that its tokenizer does not have."
                continue
            heads.append(not stream.context)
            chunks.append(Chunk(stream, token_ids, row.per_token))
        texts: list[list[str] | None] = []
        if self._text is not None:
            started = self._clock()
            texts = self._text.decoder.decode(chunks)
            self._counters.decode_seconds += (self._clock() - started) * 1e-9
        decoded = iter(zip(texts, heads, strict=True))
        for row in rows:
            self._counters.tokens += len(row.token_ids)
            pieces: list[str] | None = [""]
            head = False
            if row.state.stream is not None and not row.failure:
                pieces, head = next(decoded)
            self._settle(drain, row, pieces, head)

    def _has_unknown(self, token_ids: list[int]) -> bool:
        assert self._text is not None
        return bool(token_ids) and (min(token_ids) < 0 or max(token_ids) >= self._text.vocab_size)

    def _settle(self, drain: _Drain, row: Row, pieces: list[str] | None, head: bool) -> None:
        """One request's news go out, and its state goes when it has ended."""
        request_id = row.state.request_id
        if pieces is None:
            row.failure = "The tokenizer failed on this request's tokens."
        if row.failure or pieces is None:
            emission = failed(row)
            self._counters.row_errors += 1
            if row.finished is None:
                drain.broken.append(request_id)
        else:
            assert self._text is not None or row.state.stream is None
            emission = emit(row, pieces, self._text.decoder if self._text else None, was_head=head)
        drain.columns[api_index(request_id)].add(row, emission)
        if emission.finished is None:
            return
        self._counters.stop_overrun_tokens += emission.num_overrun
        if row.finished is not None:
            self._states.end(request_id)
            return
        if not row.failure:
            drain.stopped.append((request_id, emission.finished.finished.num_output_tokens))
        self._states.end_before_engine(request_id, overrun=not row.failure)

    # ---- what goes out -----------------------------------------------------------------------------------

    def _output(self, batches: Sequence[TokenBatch], drain: _Drain) -> DetokOutput:
        output = DetokOutput()
        if drain.stopped:
            request_ids, num_kept = map(list, zip(*drain.stopped, strict=True))
            output.to_engine.append(AbortRequest(request_ids, AbortCause.STOP_STRING, num_kept))
        if drain.broken:
            output.to_engine.append(AbortRequest(drain.broken, AbortCause.TEXT_FAILED))
        if drain.resync:
            output.to_engine.append(Resync(drain.resync, self._identity[0]))
        if drain.engine_stats is not None:  # a sign of life for everyone
            for index in range(self._num_apis):
                drain.columns.setdefault(index, Columns())
        last = batches[-1]
        engine = (last.engine_index, last.incarnation, last.step)
        stats = self._stats(batches, drain)
        for index, columns in drain.columns.items():
            if index < self._num_apis:
                output.text_batches[index] = columns.batch(self._identity, engine, drain.engine_stats, stats)
            else:
                self._counters.dropped_messages += 1
        return output

    def _stats(self, batches: Sequence[TokenBatch], drain: _Drain) -> DetokStats:
        oldest = min((batch.sent_ns for batch in batches if batch.sent_ns), default=0)
        counters = self._counters
        return DetokStats(
            num_states=len(self._states),
            lag_steps=len(batches),
            batches=counters.batches,
            tokens=counters.tokens,
            decode_seconds=counters.decode_seconds,
            evictions=counters.evictions,
            resyncs=counters.resyncs,
            late_rows=counters.late_rows,
            row_errors=counters.row_errors,
            stop_overrun_tokens=counters.stop_overrun_tokens,
            dropped_messages=counters.dropped_messages,
            lag_seconds=(self._clock() - oldest) * 1e-9 if oldest else 0.0,
            rows=len(drain.rows),
            held_streams=sum(bool(row.state.held_back) for row in drain.rows.values()),
        )


def _without_first(scores: RowLogprobs, num: int) -> RowLogprobs:
    return RowLogprobs(
        scores.row, scores.logprobs[num:], scores.ranks[num:], scores.top_ids[num:], scores.top_logprobs[num:]
    )
