"""One request's output on its way to a client: receive position, pending piece, and the wake-up of its writer.

Owner process: api. `EngineClient` pushes, the coroutine that writes the HTTP response takes. A slow reader costs
merged text in one pending piece and nothing else: nobody waits for it. No sockets, no clock.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from nanoserve.errors import ProtocolError
from nanoserve.ipc.messages import AddRequest, RowTokenTexts, TextFinished, TokenText

_STREAM_BYTES = 1200  # of a live request without ids and text, with its message; a test measures it
SILENT_NS = 5_000_000_000  # then a request is asked for; after that with twice the patience each time
_MOST_DOUBLINGS = 5
_MOST_UNSCORED = 64  # ids; more lack their entry only where there is no tokenizer to name them
_PIECE_BYTES = 64  # of a pending text besides its characters


class StreamGapError(ProtocolError):
    """A row begins after the position this stream has reached: something was lost on the way."""


class TextSink(Protocol):
    """Writes plain text of one stream: what a piece would say of which all else is constant."""

    def send_text(self, text: str) -> None:
        """Must not raise: what goes wrong is told to whoever opened the sink."""
        ...


@dataclass(slots=True)
class Piece:
    """What one request got since the last take. `num_output_tokens` counts all ids so far.

    `token_ids` are those since the last take, for a stream that `wants_ids`; else empty.
    """

    text: str
    token_ids: Sequence[int]
    logprobs: list[TokenText]
    prompt_logprobs: list[TokenText] | None
    num_output_tokens: int
    finished: TextFinished | None


class PumpQueue:
    """The outlets whose pumps are due: one call runs all that the messages of one turn brought."""

    __slots__ = ("due",)

    def __init__(self) -> None:
        self.due: list[Outlet] = []  # an outlet may append itself while others are in it; the first one calls `begin`

    def begin(self, outlet: Outlet) -> None:
        """`outlet` and all that join it run their pumps in the loop's next turn, unless `run` is called before."""
        asyncio.get_running_loop().call_soon(self.run)
        self.due.append(outlet)

    def run(self) -> None:
        """Runs the pumps that are due; whoever has just brought much text calls it instead of the loop."""
        due, self.due = self.due, []
        for outlet in due:
            outlet.is_scheduled = False
            if outlet.pump is not None:
                outlet.pump()


class Outlet:
    """Where the requests of one HTTP response meet the one coroutine that writes it."""

    __slots__ = ("_pumps", "_ready", "_waiter", "is_scheduled", "pump")

    def __init__(self, pumps: PumpQueue | None = None) -> None:
        self.pump: Callable[[], None] | None = None  # called soon instead of waking `wait`; must not raise
        self.is_scheduled = False  # in the PumpQueue
        self._pumps = PumpQueue() if pumps is None else pumps
        self._ready: list[RequestStream] = []
        self._waiter: asyncio.Future[None] | None = None

    def notify(self, stream: RequestStream) -> None:
        """Marks `stream` as having something to take. Called once per stream and take."""
        self._ready.append(stream)
        if not self.is_scheduled:
            self.wake()

    def wake(self) -> None:
        """Ends a `wait` early, with whatever is ready; or has the pump run, once for all that this turn brings."""
        if self.pump is not None:
            if not self.is_scheduled:
                self.is_scheduled = True
                pumps = self._pumps
                if pumps.due:
                    pumps.due.append(self)
                else:
                    pumps.begin(self)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> list[RequestStream]:
        """Sleeps until something is ready or `wake` is called; returns the streams that have a piece."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take_ready()

    def take_ready(self) -> list[RequestStream]:
        """The streams that have a piece, each once."""
        ready, self._ready = self._ready, []
        return ready


class Silence:
    """How long nothing was heard of a request, and how often the engine was asked since."""

    __slots__ = ("_since_ns", "num_asked")

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self.num_asked = 0  # since something that fits has come

    def end(self, now_ns: int) -> None:
        """A sign of life. New tokens need not tell of themselves unless the engine was asked: see `is_due`."""
        self._since_ns, self.num_asked = now_ns, 0

    def is_due(self, now_ns: int, last_token_ns: int) -> bool:
        """Whether to ask; each time it takes twice as long as the last."""
        since_ns = max(self._since_ns, last_token_ns)
        return now_ns - since_ns >= SILENT_NS << min(self.num_asked, _MOST_DOUBLINGS)

    def ask(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self.num_asked += 1


class RequestStream:
    """State of one live request in the api process. `output_ids` stays whole: a new engine resumes from it."""

    __slots__ = (
        "_logprobs",
        "_num_scored",
        "_num_taken",
        "_outlet",
        "_prompt_logprobs",
        "_queued",
        "_texts",
        "accepted",
        "finished",
        "first_ns",
        "index",
        "interval",
        "last_ns",
        "num_chars",
        "num_computed",
        "output_ids",
        "request",
        "silence",
        "sink",
        "wants_ids",
    )

    def __init__(
        self, request: AddRequest, outlet: Outlet, *, index: int = 0, interval: int = 1, wants_ids: bool = False
    ) -> None:
        self.request = request
        self.index = index  # of the choice in its response
        self.interval = interval  # tokens between wake-ups of the writer; the first and the last come at once
        self.wants_ids = wants_ids  # else tokens without text wake nobody
        self.output_ids = array("i")
        self.num_chars = 0
        self.sink: TextSink | None = None  # where pending text goes by `flush`; None: to who calls `take`
        self.accepted: int | None = None  # queue position, once the engine has taken it
        self.num_computed = 0  # of the prompt
        self.finished: TextFinished | None = None
        self.first_ns = 0
        self.last_ns = 0
        self.silence = Silence(request.arrival_ns)
        self._outlet = outlet
        self._num_taken = 0
        self._num_scored = 0  # logprob entries so far; they may lag behind the ids, with their text
        self._texts: list[str] = []
        self._logprobs: list[TokenText] = []
        self._prompt_logprobs: list[TokenText] | None = None
        self._queued = False

    @property
    def request_id(self) -> int:
        return self.request.request_id

    @property
    def submitted_ns(self) -> int:
        return self.request.arrival_ns

    @property
    def pending_chars(self) -> int:
        """Of the text that waits."""
        return sum(map(len, self._texts))

    @property
    def num_bytes(self) -> int:
        """About how much memory this request holds here."""
        ids = len(self.request.prompt_token_ids) + len(self.output_ids) * self.output_ids.itemsize
        return _STREAM_BYTES + ids + self.pending_chars + _PIECE_BYTES * len(self._texts)

    @property
    def num_taken(self) -> int:
        """Ids that the writer has seen."""
        return self._num_taken

    def ids_to_resume_from(self) -> array[int]:
        """What a new engine need not compute again: all ids, or, with log-probabilities, those whose entry is here.

        The others' entries were held back with their text and are gone with the old engine. Drawn again from the same
        numbers they are the same ids.
        """
        num_behind = len(self.output_ids) - self._num_scored
        if self.request.sampling.logprobs is None or num_behind > _MOST_UNSCORED:
            return self.output_ids
        return self.output_ids[: self._num_scored]

    def push_row(
        self,
        delta: str,
        char_offset: int,
        first_index: int,
        ids: Sequence[int],
        logprobs: RowTokenTexts | None = None,
    ) -> int:
        """Takes one row; what this stream already has is dropped. Returns how many ids were new, -1 for a mere repeat.

        Raises StreamGapError when the row starts beyond the position reached.
        """
        known_chars = self.num_chars - char_offset
        known_ids = len(self.output_ids) - first_index
        if known_chars or known_ids:
            if known_chars < 0 or known_ids < 0:
                raise StreamGapError(f"row at token {first_index}, char {char_offset} is ahead of the stream")
            ids = ids[known_ids:]
            delta = delta[known_chars:]
        scored = logprobs is not None and self._push_logprobs(logprobs)
        if delta:
            self._texts.append(delta)
            self.num_chars += len(delta)
        elif not ids and not scored:
            return -1
        self.output_ids.extend(ids)
        if self._queued:
            return len(ids)
        taken = self._num_taken
        is_due = len(self.output_ids) - taken >= self.interval or not ids
        if (is_due and (delta or scored or self.wants_ids)) or not taken:
            self._queued = True
            if self.sink is None:
                self._outlet.notify(self)
        return len(ids)

    def _push_logprobs(self, row: RowTokenTexts) -> bool:
        """Takes the entries that are new; True when there was one."""
        known = max(self._num_scored - row.first_index, 0)
        self._logprobs.extend(row.tokens[known:])
        self._num_scored = max(self._num_scored, row.first_index + len(row.tokens))
        return len(row.tokens) > known

    def push_prompt_logprobs(self, tokens: list[TokenText]) -> None:
        """Kept for the first piece; a repeat after a resubmission is dropped."""
        if self._prompt_logprobs is None and self._num_taken == 0:
            self._prompt_logprobs = tokens

    def accept(self, queue_position: int, num_computed: int = 0) -> None:
        """The engine has taken it, or tells how far it is."""
        self.accepted = queue_position
        self.num_computed = num_computed
        self._outlet.wake()

    def finish(self, record: TextFinished) -> None:
        """The terminal record; the writer finds it in the last piece."""
        self.finished = record
        stop_token = record.finished.stop_token_id
        last = self._logprobs[-1] if self._logprobs else None
        if stop_token is not None and last is not None and last.token_id == stop_token and not last.raw:
            self._logprobs.pop()  # the token that ended the text is not part of it
        self.close_sink()
        if not self._queued:
            self._queued = True
            self._outlet.notify(self)

    def flush(self) -> None:
        """Gives the sink the text that is due. Called after every drain that brought rows, one or several."""
        sink, texts = self.sink, self._texts
        if sink is None or not self._queued:
            return
        self._queued = False
        self._num_taken = len(self.output_ids)
        if texts:
            text = texts[0] if len(texts) == 1 else "".join(texts)
            texts.clear()
            sink.send_text(text)

    def close_sink(self) -> None:
        """From now on `take` has what comes, and what is due but not flushed."""
        if self.sink is not None:
            self.sink = None
            if self._queued:
                self._outlet.notify(self)

    def take(self) -> Piece:
        """All that is pending, merged."""
        self._queued = False
        piece = Piece(
            text="".join(self._texts),
            token_ids=self.output_ids[self._num_taken :] if self.wants_ids else (),
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
            num_output_tokens=len(self.output_ids),
            finished=self.finished,
        )
        self._texts.clear()
        self._logprobs = []
        self._prompt_logprobs = None
        self._num_taken = len(self.output_ids)
        return piece
