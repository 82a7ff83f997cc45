"""One request's output on its way to a client: receive position, pending piece, and the wake-up of its writer.

Owner process: api. `EngineClient` pushes, the coroutine that writes the HTTP response takes. A slow reader costs
merged text in one pending piece and nothing else: nobody waits for it. No sockets, no clock.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanoserve.errors import ProtocolError
from nanoserve.ipc.messages import AddRequest, RowTokenTexts, TextFinished, TokenText

_STREAM_BYTES = 1200  # of a live request without ids and text, with its message; a test measures it
SILENT_NS = 5_000_000_000  # then a request is asked for; after that with twice the patience each time
_MOST_DOUBLINGS = 5
_PIECE_BYTES = 64  # of a pending text besides its characters


class StreamGapError(ProtocolError):
    """A row begins after the position this stream has reached: something was lost on the way."""


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
    """The outlets whose pumps are due: one call from the loop runs all that one batch of text brought."""

    __slots__ = ("_due",)

    def __init__(self) -> None:
        self._due: list[Outlet] = []

    def add(self, outlet: Outlet) -> None:
        """`outlet` runs its pump in the loop's next turn. Called once per outlet and turn."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(outlet)

    def _run(self) -> None:
        due, self._due = self._due, []
        for outlet in due:
            outlet.run_pump()


class Outlet:
    """Where the requests of one HTTP response meet the one coroutine that writes it."""

    __slots__ = ("_is_scheduled", "_pumps", "_ready", "_waiter", "pump")

    def __init__(self, pumps: PumpQueue | None = None) -> None:
        self.pump: Callable[[], None] | None = None  # called soon instead of waking `wait`; must not raise
        self._pumps = PumpQueue() if pumps is None else pumps
        self._ready: list[RequestStream] = []
        self._is_scheduled = False
        self._waiter: asyncio.Future[None] | None = None

    def notify(self, stream: RequestStream) -> None:
        """Marks `stream` as having something to take. Called once per stream and take."""
        self._ready.append(stream)
        self.wake()

    def wake(self) -> None:
        """Ends a `wait` early, with whatever is ready; or has the pump run, once for all that this turn brings."""
        if self.pump is not None:
            if not self._is_scheduled:
                self._is_scheduled = True
                self._pumps.add(self)
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

    def run_pump(self) -> None:
        """Called by the PumpQueue."""
        self._is_scheduled = False
        if self.pump is not None:
            self.pump()


class Silence:
    """How long nothing was heard of a request, and how often the engine was asked since."""

    __slots__ = ("_num_asked", "_since_ns")

    def __init__(self, since_ns: int) -> None:
        self._since_ns = since_ns
        self._num_asked = 0

    def end(self, now_ns: int) -> None:
        """A sign of life."""
        self._since_ns, self._num_asked = now_ns, 0

    @property
    def is_asked(self) -> bool:
        """Whether the engine was asked, and nothing that fits has come since."""
        return self._num_asked > 0

    def is_due(self, now_ns: int) -> bool:
        """Whether to ask; each time it takes twice as long as the last."""
        return now_ns - self._since_ns >= SILENT_NS << min(self._num_asked, _MOST_DOUBLINGS)

    def ask(self, now_ns: int) -> None:
        self._since_ns = now_ns
        self._num_asked += 1


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
        "pending_chars",
        "request",
        "silence",
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
        self.pending_chars = 0
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
    def num_bytes(self) -> int:
        """About how much memory this request holds here."""
        ids = len(self.request.prompt_token_ids) + len(self.output_ids) * self.output_ids.itemsize
        return _STREAM_BYTES + ids + self.pending_chars + _PIECE_BYTES * len(self._texts)

    @property
    def num_taken(self) -> int:
        """Ids that the writer has seen."""
        return self._num_taken

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
        if known_chars < 0 or known_ids < 0:
            raise StreamGapError(f"row at token {first_index}, char {char_offset} is ahead of the stream")
        if known_ids:
            ids = ids[known_ids:]
        if known_chars:
            delta = delta[known_chars:]
        scored = self._push_logprobs(logprobs) if logprobs is not None else False
        if not ids and not delta and not scored:
            return -1
        if delta:
            self._texts.append(delta)
            self.num_chars += len(delta)
            self.pending_chars += len(delta)
        self.output_ids.extend(ids)
        pending = len(self.output_ids) - self._num_taken
        is_first = self._num_taken == 0
        if is_first or ((pending >= self.interval or not ids) and (delta or scored or self.wants_ids)):
            self._announce()
        return len(ids)

    def _push_logprobs(self, row: RowTokenTexts) -> bool:
        """Takes the entries that are new. After a restart of the engine some may be missing; those are not made up."""
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
        self._announce()

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
        self.pending_chars = 0
        self._num_taken = len(self.output_ids)
        return piece

    def _announce(self) -> None:
        if not self._queued:
            self._queued = True
            self._outlet.notify(self)
