"""Event streams that survive a dropped connection: `id:` per event, and `Last-Event-ID` to go on after it.

Owner process: api; used with `--resume-grace`. The answer is produced by a task of its own into a bounded log; HTTP
connections only follow that log. When nobody has followed for the grace time, the answer is given up; ended answers are
also bounded in number and bytes, and the oldest are forgotten early. Ids are `<response id>:<number>`, absolute, so a
reconnect at any point has neither a gap nor a repeat.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import islice

from aiohttp import web

from nanoserve.api.errors import http_error
from nanoserve.api.sse import Around

LAST_EVENT_ID = "Last-Event-ID"
_MAX_TAKEN_BYTES = 256 << 10
_MAX_ENDED = 1024  # answers that have ended and wait for a client who may ask for them again
_MAX_ENDED_BYTES = 64 << 20  # of their logs together


class EventLog:
    """The last events of one stream. Takes the place of an `EventWriter` for the task that produces the answer."""

    def __init__(self, stream_id: str, max_bytes: int, clock_s: Callable[[], float]) -> None:
        self._stream_id = stream_id
        self._max_bytes = max_bytes
        self._clock_s = clock_s
        self._events: deque[bytes] = deque()
        self._first = 1  # number of the oldest event kept
        self._num_bytes = 0
        self._changed: asyncio.Future[None] | None = None
        self.begun = asyncio.Event()
        self.is_over = False
        self.last_write_s = clock_s()
        self.blocked_since_s = 0.0  # a log never makes its producer wait

    @property
    def next_number(self) -> int:
        return self._first + len(self._events)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    async def begin(self, data: bytes) -> None:
        self.send(data)
        self.begun.set()

    def send(self, data: bytes) -> bool:
        """Numbers the events of `data` and keeps them; the oldest go when the log is full. Never blocks."""
        for event in data.split(b"\n\n"):
            if not event:
                continue
            line = b"" if event.startswith(b":") else f"id: {self._stream_id}:{self.next_number}\n".encode()
            self._events.append(line + event + b"\n\n")
            self._num_bytes += len(self._events[-1])
        while self._num_bytes > self._max_bytes and len(self._events) > 1:
            self._num_bytes -= len(self._events.popleft())
            self._first += 1
        self.last_write_s = self._clock_s()
        self._wake()
        return True

    def open_texts(self, around: Around, on_stop: Callable[[Exception | None], None]) -> None:
        """Every event gets its number here."""

    async def drained(self) -> None:
        return

    async def finish(self) -> None:
        self.is_over = True
        self._wake()

    def cut(self) -> None:
        """Nothing to cut: a follower that is too slow falls off the log by itself."""

    def since(self, number: int) -> list[bytes]:
        """Events after `number`. RequestError 410 when some of them are gone already."""
        skip = number + 1 - self._first
        if skip < 0 or number >= self.next_number:
            raise http_error(410, "The stream cannot be resumed from this event.")
        newest_first = list(islice(reversed(self._events), len(self._events) - skip))
        return newest_first[::-1]

    async def wait(self) -> None:
        """Returns when there is more, or the end."""
        if self._changed is None or self._changed.done():
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._changed)

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)


class ResumableStream:
    """One answer in the making, and who follows it. The Pacer ends it when nobody has for the grace time."""

    def __init__(
        self, log: EventLog, task: asyncio.Task[None], grace_s: float, clock_s: Callable[[], float], *, owner: str
    ) -> None:
        self.log = log
        self._owner = owner
        self._task = task
        self._grace_s = grace_s
        self._clock_s = clock_s
        self._num_followers = 0
        self._left_s = clock_s()

    def is_given_up(self, now_s: float) -> bool:
        return not self._num_followers and now_s - self._left_s >= self._grace_s

    @property
    def is_followed(self) -> bool:
        return self._num_followers > 0

    def is_owned_by(self, key: str) -> bool:
        return hmac.compare_digest(self._owner.encode("utf-8", "surrogatepass"), key.encode("utf-8", "surrogatepass"))

    def give_up(self) -> None:
        self._task.cancel()

    async def take(self, after: int, patience_s: float) -> tuple[list[bytes], bool]:
        """For a follower at another api process: events after `after`, as many as a message may carry, and whether
        they are the last. Waits for the first one, but not longer than `patience_s`.
        """
        self._num_followers += 1
        try:
            if patience_s and not self.log.since(after) and not self.log.is_over:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience_s):
                        await self.log.wait()
            events, num_bytes = [], 0
            for event in self.log.since(after):
                events.append(event)
                num_bytes += len(event)
                if num_bytes >= _MAX_TAKEN_BYTES:
                    break
            return events, self.log.is_over and after + len(events) + 1 == self.log.next_number
        finally:
            self._num_followers -= 1
            self._left_s = self._clock_s()

    async def follow(self, request: web.Request, after: int, headers: dict[str, str]) -> web.StreamResponse:
        """Writes the events after `after`, then those that come, until the end or until this client goes."""
        self._num_followers += 1
        try:
            events = self.log.since(after)
            response = web.StreamResponse(headers=headers)
            await response.prepare(request)
            while True:
                if events:
                    await response.write(b"".join(events))
                    after += len(events)
                elif self.log.is_over:
                    break
                else:
                    await self.log.wait()
                events = self.log.since(after)
            await response.write_eof()
            return response
        finally:
            self._num_followers -= 1
            self._left_s = self._clock_s()


class Resumes:
    """The resumable streams of this api process, by id.

    Live ones are bounded by admission, each log by `max_bytes`. Ended ones are bounded here, by `max_ended` and
    `max_ended_bytes`: beyond that the first to end that nobody follows is forgotten, and is a 404 from then on.
    """

    def __init__(
        self,
        *,
        grace_s: float,
        max_bytes: int,
        clock_s: Callable[[], float],
        max_ended: int = _MAX_ENDED,
        max_ended_bytes: int = _MAX_ENDED_BYTES,
    ) -> None:
        self._grace_s = grace_s
        self._max_bytes = max_bytes
        self._clock_s = clock_s
        self._max_ended = max_ended
        self._max_ended_bytes = max_ended_bytes
        self._streams: dict[str, ResumableStream] = {}
        self._ended: dict[str, ResumableStream] = {}  # of those, in the order in which they ended
        self._num_ended_bytes = 0
        self.num_forgotten = 0  # before their grace time was over

    def __len__(self) -> int:
        return len(self._streams)

    async def start(
        self, stream_id: str, produce: Callable[[EventLog], Awaitable[None]], *, owner: str = ""
    ) -> ResumableStream:
        """Begins the answer; returns when its headers may go out, raises what refuses it before that."""
        log = EventLog(stream_id, self._max_bytes, self._clock_s)

        async def run() -> None:
            try:
                await produce(log)
            finally:
                await log.finish()

        task = asyncio.get_running_loop().create_task(run())
        begun = asyncio.get_running_loop().create_task(log.begun.wait())
        try:
            await asyncio.wait([task, begun], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            task.cancel()  # the client went away before it knew the id
            raise
        finally:
            begun.cancel()
        if not log.begun.is_set():
            task.result()  # raises the refusal
        stream = ResumableStream(log, task, self._grace_s, self._clock_s, owner=owner)
        self._streams[stream_id] = stream
        task.add_done_callback(lambda _: self._note_ended(stream_id))
        return stream

    def find(self, event_id: str, key: str = "") -> tuple[ResumableStream, int]:
        """The stream and the number in a `Last-Event-ID`.

        RequestError 404 when it is not, or no longer, here, or another API key than this began it.
        """
        stream_id, _, number = event_id.rpartition(":")
        stream = self._streams.get(stream_id)
        if (
            stream is None
            or not stream.is_owned_by(key)
            or not (number.isascii() and number.isdigit() and len(number) < 16)
        ):
            raise http_error(404, "There is no such stream to resume.")
        return stream, int(number)

    def tick(self, now_s: float) -> None:
        """Forgets streams that nobody has followed for the grace time; those still in the making end."""
        for stream_id, stream in list(self._streams.items()):
            if stream.is_given_up(now_s):
                stream.give_up()
                self._forget(stream_id)

    def close(self) -> None:
        for stream_id, stream in list(self._streams.items()):
            stream.give_up()
            self._forget(stream_id)

    def _note_ended(self, stream_id: str) -> None:
        """Makes room for it among the ended ones; one that was given up is gone already."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._ended[stream_id] = stream
        self._num_ended_bytes += stream.log.num_bytes
        for oldest_id, oldest in list(self._ended.items()):
            if len(self._ended) <= self._max_ended and self._num_ended_bytes <= self._max_ended_bytes:
                break
            if not oldest.is_followed:
                self._forget(oldest_id)
                self.num_forgotten += 1

    def _forget(self, stream_id: str) -> None:
        stream = self._streams.pop(stream_id)
        if self._ended.pop(stream_id, None) is not None:
            self._num_ended_bytes -= stream.log.num_bytes  # an ended log does not change
