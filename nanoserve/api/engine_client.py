"""The api process's end of the ring: submits requests, dispatches text, resumes requests on a new engine.

Owner process: api. Owns the one dict of live requests. `process` feeds `deliver` with what the inbox brings; handlers
call `submit` and `abort`. Delivery is idempotent by absolute offsets: repeats are dropped; where a part is missing, and
where nothing comes for long, the whole output is asked for again, so that no lost message changes a text or leaves
anybody waiting for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from nanoserve.api.stream import SILENT_NS, Outlet, RequestStream, StreamGapError
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.ids import RequestIdAllocator
from nanoserve.ipc.messages import (
    AbortCause,
    AbortRequest,
    AddRequest,
    EngineInbox,
    Failure,
    Finished,
    FinishReason,
    FlushCache,
    Pause,
    Release,
    Resync,
    SamplingParams,
    StartProfile,
    StopProfile,
    TextBatch,
    TextFinished,
    TextSpec,
)

DEADLINE_WORD = "timeout"  # stop reason of a request that its deadline ended
ABORTED_WORD = "abort_request"  # and of one that somebody else ended
_LOOK_NS = 1_000_000_000


@dataclass(slots=True)
class ClientCounters:
    """Counted, never silent."""

    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    late_rows: int = 0
    repeated_rows: int = 0
    gaps: int = 0  # streams that lost a part, which was asked for again
    resubmitted: int = 0
    asked: int = 0  # requests that had been silent for long


class LatencySink:
    """What `EngineClient` tells about time; `metrics` implements it. Seconds."""

    def first_token(self, seconds: float) -> None: ...

    def inter_token(self, seconds: float, num_tokens: int) -> None: ...

    def finished(self, record: Finished, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRequest:
    """One single request, ready for the engine but for its id."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    text: TextSpec
    priority: int = 0
    cache_salt: str = ""
    share_key: str = ""  # whose share of the engine it takes, with fair scheduling
    num_siblings: int = 1  # single requests of the same HTTP request
    index: int = 0  # of the choice in its response
    interval: int = 1  # tokens between frames


class EngineClient:
    """Live requests by id. `send` queues one message to the engine and never blocks."""

    def __init__(
        self,
        ids: RequestIdAllocator,
        send: Callable[[EngineInbox], object],
        clock_ns: Callable[[], int],
        latency: LatencySink | None = None,
    ) -> None:
        self.counters = ClientCounters()
        self._ids = ids
        self._send = send
        self._clock_ns = clock_ns
        self._latency = latency or LatencySink()
        self._live: dict[int, RequestStream] = {}
        self._ending: dict[int, int] = {}  # aborted by us, and when; terminal record still to come
        self._reminded: set[int] = set()  # of those, the ones whose end we have asked for again
        self._asked: set[int] = set()  # live ones the engine was asked for, of which nothing new has come yet
        self._due: list[RequestStream] = []  # with a sink, and a row that `flush` has not seen
        self._look_due_ns = 0
        self._engine_incarnation = 0
        self._encode_text_spec = msgspec.msgpack.Encoder().encode

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_ending(self) -> int:
        return len(self._ending)

    def stream_bytes(self) -> int:
        """About how much memory the live requests hold: prompts, output ids, text that waits. Any thread may ask."""
        return sum(stream.num_bytes for stream in list(self._live.values()))

    def submit(self, new: NewRequest, outlet: Outlet) -> RequestStream:
        """Sends the request to the engine; its output arrives in `outlet`."""
        request = AddRequest(
            request_id=self._ids.next(),
            prompt_token_ids=pack_ids(new.prompt_token_ids),
            sampling=new.sampling,
            text_spec=self._encode_text_spec(new.text),
            priority=new.priority,
            cache_salt=new.cache_salt,
            share_key=new.share_key,
            num_siblings=new.num_siblings,
            arrival_ns=self._clock_ns(),
        )
        stream = RequestStream(
            request, outlet, index=new.index, interval=new.interval, wants_ids=new.text.return_token_ids
        )
        self._live[request.request_id] = stream
        self.counters.submitted += 1
        self._send(request)
        return stream

    def abort(self, streams: Iterable[RequestStream], cause: AbortCause) -> None:
        """Ends those that still live; one message. Safe to call for finished ones and twice."""
        request_ids = [s.request_id for s in streams if self._live.pop(s.request_id, None) is not None]
        if not request_ids:
            return
        self._ending.update(dict.fromkeys(request_ids, self._clock_ns()))
        self.counters.aborted += len(request_ids)
        self._send(AbortRequest(request_ids=request_ids, cause=cause))

    def expire(self, streams: Iterable[RequestStream], word: str = DEADLINE_WORD) -> None:
        """Ends those that still live: what they have is the answer, `word` its stop reason."""
        late = [stream for stream in streams if stream.request_id in self._live]
        self.abort(late, AbortCause.DEADLINE)
        for stream in late:
            ended = Finished(
                request_id=stream.request_id,
                reason=FinishReason.ABORT,
                num_output_tokens=len(stream.output_ids),
            )
            stream.finish(TextFinished(ended, stop_string=word))

    def tell(self, message: FlushCache | Pause | StartProfile | StopProfile) -> None:
        """A word to the engine that is about no request."""
        self._send(message)

    def deliver(self, batch: TextBatch) -> None:
        """Dispatches one drained batch: rows first, then terminal records, then one Release for all of them.

        What is ahead of its stream is not taken: it comes again, behind what was lost.
        """
        self.note_engine(batch.engine_incarnation)
        for accepted in batch.accepted:
            if (stream := self._live.get(accepted.request_id)) is not None:
                stream.silence.end(self._clock_ns())
                stream.accept(accepted.queue_position, accepted.num_computed)
        for prompt in batch.prompt_logprobs:
            if (stream := self._live.get(prompt.request_id)) is not None:
                stream.push_prompt_logprobs(prompt.tokens)
        torn = self._deliver_rows(batch) if batch.request_ids else []
        if batch.finished:
            early = [record for record in batch.finished if _lacks_output(record, self._live)]
            ends = [record for record in batch.finished if record not in early] if early else batch.finished
            torn += [self._live[record.finished.request_id] for record in early]
            for record in ends:
                self._finish(record)
            if ends:
                self._send(Release(request_ids=[record.finished.request_id for record in ends]))
        if torn:
            self._ask_for_lost(torn)

    def flush(self) -> None:
        """Writes what the batches since the last call brought for sinks: one event for each stream."""
        due, self._due = self._due, []
        for stream in due:
            stream.flush()

    def note_engine(self, incarnation: int) -> None:
        """Called with every incarnation number seen; a higher one means the old engine's requests are gone."""
        if incarnation <= self._engine_incarnation:
            return
        is_first = self._engine_incarnation == 0
        self._engine_incarnation = incarnation
        if not is_first:
            self.resubmit_all()

    def resubmit_all(self) -> None:
        """Hands every live request to a new engine with the ids that are already here."""
        self._ending.clear()
        self._reminded.clear()
        now_ns = self._clock_ns()
        for stream in self._live.values():
            self._send(_with_output(stream))
            self.counters.resubmitted += 1
            stream.silence.end(now_ns)

    def ask_for_silent(self, now_ns: int) -> None:
        """Asks the engine for what has been silent for long: whatever was lost, on whichever edge, comes again.

        A request that the engine has is not taken twice, and what it tells again is dropped where it is known. An end
        that we asked for and that has not come is asked for once more. Called often; looks once a second.
        """
        if now_ns < self._look_due_ns:
            return
        was_away = now_ns - self._look_due_ns > _LOOK_NS  # this process did not run: what has come is still unread
        self._look_due_ns = now_ns + _LOOK_NS
        if was_away:
            return
        self._asked &= self._live.keys()
        silent = [stream for stream in self._live.values() if stream.silence.is_due(now_ns, stream.last_ns)]
        for stream in silent:
            self._send(_with_output(stream))
            stream.silence.ask(now_ns)
            self._asked.add(stream.request_id)
        if silent:
            self.counters.asked += len(silent)
            self._send(Resync(request_ids=[stream.request_id for stream in silent]))
        late = [request_id for request_id, at_ns in self._ending.items() if now_ns - at_ns >= SILENT_NS]
        if late:
            self._remind_of_ends(late, now_ns)

    def _remind_of_ends(self, request_ids: list[int], now_ns: int) -> None:
        """Once each; an engine that does not answer then has no such request."""
        again = [request_id for request_id in request_ids if request_id not in self._reminded]
        for request_id in request_ids:
            if request_id in self._reminded:
                self._reminded.discard(request_id)
                del self._ending[request_id]
            else:
                self._reminded.add(request_id)
                self._ending[request_id] = now_ns
        if again:
            self._send(AbortRequest(request_ids=again, cause=AbortCause.CLIENT_GONE))
            self._send(Resync(request_ids=again))

    def fail_all(self, failure: Failure) -> None:
        """Gives every live request a terminal record of our own making (the server is about to end)."""
        for stream in list(self._live.values()):
            ended = Finished(request_id=stream.request_id, reason=FinishReason.ERROR, failure=failure)
            stream.finish(TextFinished(ended))
        self._live.clear()

    def _ask_for_lost(self, torn: list[RequestStream]) -> None:
        """Has the outputs of these told whole, once; where that word is lost too, `ask_for_silent` asks again."""
        now_ns = self._clock_ns()
        unasked = {stream.request_id: stream for stream in torn if not stream.silence.num_asked}
        for stream in unasked.values():
            stream.silence.ask(now_ns)
            self._asked.add(stream.request_id)
        if unasked:
            self.counters.gaps += len(unasked)
            self._send(Resync(request_ids=list(unasked)))

    def _deliver_rows(self, batch: TextBatch) -> list[RequestStream]:
        """Returns the streams that lack what comes before their row."""
        torn: list[RequestStream] = []
        waits: dict[float, int] = {}  # nanoseconds per token, and how many tokens came after that time
        now_ns = self._clock_ns()
        ids = unpack_ids(batch.token_ids)
        logprobs = {scored.row: scored for scored in batch.logprobs}
        live, asked, start = self._live, self._asked, 0
        rows = zip(batch.request_ids, batch.deltas, batch.char_offset, batch.first_index, batch.num_tokens, strict=True)
        for row, (request_id, delta, char_offset, first_index, num_tokens) in enumerate(rows):
            end = start + num_tokens
            stream = live.get(request_id)
            if stream is None:
                self.counters.late_rows += 1
                start = end
                continue
            try:
                scored = logprobs.get(row) if logprobs else None
                num_new = stream.push_row(delta, char_offset, first_index, ids[start:end], scored)
            except StreamGapError:
                torn.append(stream)
            else:
                if stream.sink is not None:
                    self._due.append(stream)
                if num_new > 0 and stream.last_ns and request_id not in asked:
                    wait = (now_ns - stream.last_ns) / num_new
                    waits[wait] = waits.get(wait, 0) + num_new
                    stream.last_ns = now_ns
                else:
                    self._note_unusual(stream, num_new, now_ns)
            start = end
        for wait, num_tokens in waits.items():
            self._latency.inter_token(wait * 1e-9, num_tokens)
        return torn

    def _note_unusual(self, stream: RequestStream, num_new: int, now_ns: int) -> None:
        """A row was the first of its stream, or after the engine was asked, or had no new ids."""
        self._asked.discard(stream.request_id)
        stream.silence.end(now_ns)
        if num_new <= 0:
            self.counters.repeated_rows += num_new < 0
            return
        if stream.first_ns:
            self._latency.inter_token((now_ns - stream.last_ns) * 1e-9 / num_new, num_new)
        else:
            stream.first_ns = now_ns
            self._latency.first_token((now_ns - stream.submitted_ns) * 1e-9)
        stream.last_ns = now_ns

    def _finish(self, record: TextFinished) -> None:
        request_id = record.finished.request_id
        stream = self._live.pop(request_id, None)
        if stream is None:
            if request_id in self._ending:
                del self._ending[request_id]
                self._reminded.discard(request_id)
            else:
                self.counters.late_rows += 1
            return
        self.counters.finished += 1
        if record.stop_string is not None and not record.finished.num_prompt_tokens:
            record = _with_prompt(record, stream, self._clock_ns())
        self._latency.finished(record.finished, (self._clock_ns() - stream.submitted_ns) * 1e-9)
        stream.finish(record)


def _lacks_output(record: TextFinished, live: dict[int, RequestStream]) -> bool:
    """Whether ids before this end have not come."""
    finished = record.finished
    stream = live.get(finished.request_id)
    if stream is None or not finished.reason.is_regular:
        return False
    return finished.num_output_tokens > len(stream.output_ids)


def _with_output(stream: RequestStream) -> AddRequest:
    return msgspec.structs.replace(stream.request, output_token_ids=pack_ids(stream.ids_to_resume_from()))


def _with_prompt(record: TextFinished, stream: RequestStream, now_ns: int) -> TextFinished:
    """The detokenizer ends a request at a stop string before the engine does, and knows nothing of its prompt."""
    finished = msgspec.structs.replace(
        record.finished,
        num_prompt_tokens=len(stream.request.prompt_token_ids) // 4,  # packed int32
        arrival_ns=stream.request.arrival_ns,
        finished_ns=now_ns,
    )
    return msgspec.structs.replace(record, finished=finished)
