"""The detokenizer without its sockets: token batches in, text batches and words for the engine out. Pure.

Owner: the detokenizer process (and `nanoserve.LLM`, in its own). A call takes all batches that wait, so that a
detokenizer that lags decodes longer pieces instead of a longer queue. In order: take in rows by their absolute index
(`intake`), decode all of them at once, then stop strings and columns per api process (`emit`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nanoserve.config import DetokConfig
from nanoserve.detok.emit import Columns, Row, emit, failed
from nanoserve.detok.incremental import Chunk
from nanoserve.detok.intake import Counters, Drain, Intake
from nanoserve.detok.state import StateTable
from nanoserve.detok.token_table import TokenTable, build_table
from nanoserve.detok.vocabulary import Vocabulary
from nanoserve.ipc.messages import AbortCause, AbortRequest, DetokStats, Resync, TextBatch, TokenBatch
from nanoserve.tokenizer import Tokenizer


@dataclass(slots=True)
class DetokOutput:
    """What one drain says: at most one message per api process, and what the engine must hear."""

    text_batches: dict[int, TextBatch] = field(default_factory=dict)  # by api index
    to_engine: list[AbortRequest | Resync] = field(default_factory=list)


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
        self._vocabulary: Vocabulary | None = None
        if tokenizer is not None:
            proved = build_table(tokenizer) if table == "build" else table
            self._vocabulary = Vocabulary(tokenizer, config.detokenizer, proved)
        self._identity = (detok_index, incarnation)
        self._num_apis = num_apis
        self._clock = clock
        self._counters = Counters()
        self._states = StateTable(config.detok_max_states)
        self._intake = Intake(self._vocabulary, self._states, self._counters)

    def resync_all(self) -> Resync:
        """The first word of a detokenizer that took another's place."""
        self._intake.await_all()
        return Resync(request_ids=[], detok_index=self._identity[0])

    @property
    def num_states(self) -> int:
        return len(self._states)

    def state_bytes(self) -> int:
        """About how much memory the states hold. Any thread may ask."""
        return self._states.num_bytes()

    @property
    def num_tracked(self) -> int:
        """States and everything else that is remembered of requests; 0 when nothing lives."""
        return len(self._states) + self._states.num_ended + self._states.num_awaited

    @property
    def decoder_name(self) -> str:
        """What ids become text by: "bytes", "window", or "none"."""
        return self._vocabulary.decoder_name if self._vocabulary is not None else "none"

    def process(self, batches: Sequence[TokenBatch]) -> DetokOutput:
        """One drain. Never raises for what a batch says; a row that cannot be decoded ends that request alone."""
        drain = self._intake.take(batches)
        if drain is None:
            return DetokOutput()
        self._advance(drain)
        self._counters.evictions += self._states.evict()
        return self._output(drain)

    def _advance(self, drain: Drain) -> None:
        """Decodes all rows at once; plain ones are done then, the others are settled one by one."""
        plain: list[Row] = []
        others: list[Row] = []
        chunks: list[Chunk] = []
        for row in drain.rows.values():
            state = row.state
            if state.is_plain and row.finished is None and row.scores is None and not drain.suspect:
                assert state.stream is not None
                if row.token_ids:
                    plain.append(row)
                    chunks.append((state.stream, row.token_ids, False))
            else:
                others.append(row)
        heads = [self._add_chunk(drain, row, chunks) for row in others]
        texts: list[list[str] | None] = []
        if self._vocabulary is not None:
            started = self._clock()
            texts = self._vocabulary.decoder.decode(chunks)
            self._counters.decode_seconds += (self._clock() - started) * 1e-9
        self._counters.tokens += sum(len(row.token_ids) for row in drain.rows.values())
        others_texts = iter(texts[len(plain) :])
        self._send_plain(drain, plain, texts[: len(plain)])
        for row, head in zip(others, heads, strict=True):
            self._settle(drain, row, [""] if head is None else next(others_texts), bool(head))

    def _add_chunk(self, drain: Drain, row: Row, chunks: list[Chunk]) -> bool | None:
        """Adds what is to be decoded. True where it begins the text, None where nothing is to be decoded."""
        stream = row.state.stream
        if stream is None or row.failure:
            return None
        token_ids = row.take_ids()
        if drain.suspect and self._vocabulary is not None and self._vocabulary.lacks_any(token_ids):
            row.failure = "The model made a token that its tokenizer does not have."
            return None
        chunks.append((stream, token_ids, row.per_token))
        return not stream.context

    def _send_plain(self, drain: Drain, rows: list[Row], texts: list[list[str] | None]) -> None:
        by_api: dict[int, tuple[list[Row], list[str]]] = {}
        for row, pieces in zip(rows, texts, strict=True):
            if pieces is None:
                self._settle(drain, row, None, False)
                continue
            group = by_api.get(row.state.api)
            if group is None:
                group = by_api[row.state.api] = ([], [])
            group[0].append(row)
            group[1].append(pieces[0])
        for index, (api_rows, deltas) in by_api.items():
            drain.columns[index].add_plain(api_rows, deltas)

    def _settle(self, drain: Drain, row: Row, pieces: list[str] | None, head: bool) -> None:
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
            decoder = self._vocabulary.decoder if self._vocabulary is not None else None
            emission = emit(row, pieces, decoder, was_head=head)
        drain.columns[row.state.api].add(row, emission)
        if emission.finished is None:
            return
        self._counters.stop_overrun_tokens += emission.num_overrun
        if row.finished is not None:
            self._states.end(request_id)
            return
        if not row.failure:
            drain.stopped.append((request_id, emission.finished.finished.num_output_tokens))
        self._states.end_before_engine(request_id, overrun=not row.failure)

    def _output(self, drain: Drain) -> DetokOutput:
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
        engine = (drain.last.engine_index, drain.last.incarnation, drain.last.step)
        stats = self._stats(drain)
        for index, columns in drain.columns.items():
            if index < self._num_apis:
                output.text_batches[index] = columns.batch(self._identity, engine, drain.engine_stats, stats)
            else:
                self._counters.dropped_messages += 1
        return output

    def _stats(self, drain: Drain) -> DetokStats:
        counters = self._counters
        return DetokStats(
            num_states=len(self._states),
            lag_steps=drain.num_batches,
            batches=counters.batches,
            tokens=counters.tokens,
            decode_seconds=counters.decode_seconds,
            evictions=counters.evictions,
            resyncs=counters.resyncs,
            forced_flushes=self._vocabulary.num_cuts if self._vocabulary is not None else 0,
            late_rows=counters.late_rows,
            row_errors=counters.row_errors,
            stop_overrun_tokens=counters.stop_overrun_tokens,
            dropped_messages=counters.dropped_messages,
            lag_seconds=(self._clock() - drain.oldest_ns) * 1e-9 if drain.oldest_ns else 0.0,
            rows=len(drain.rows),
            held_streams=sum(bool(row.state.held_back) for row in drain.rows.values()),
        )
