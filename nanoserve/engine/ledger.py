"""What the engine remembers of each request until its terminal record has reached api. Owned by `EngineCore`.

The detokenizer may die, or forget a state, at any moment: from this ledger its streams are rebuilt. A record begins
at admission, grows with the output (4 bytes a token, more where log-probabilities are asked for), and is forgotten on
`Release`. Where that does not come, the end or its release was lost: the request is told again, some times, and then
forgotten.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import Finished, Opened, PromptLogprobs
from nanoserve.sched.plan import TokenScores
from nanoserve.sched.request import StepOutput, TokenRow

# Bounds what an api process that never releases can cost. The oldest go first: their clients had the most time.
MAX_RETAINED = 16384
RETELL_NS = 10_000_000_000  # how long after its end a release is late; twice as long each time
MAX_RETOLD = 5


@dataclass(slots=True, eq=False)
class Record:
    """One request. The output tokens from `num_resumed` on were computed here; `scores` has an entry for each of
    them where log-probabilities were asked for, else it is None."""

    request_id: int
    text_spec: bytes
    output_ids: array[int]
    num_resumed: int = 0
    scores: list[TokenScores] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finished: Finished | None = None
    released: bool = False
    num_retold: int = 0


@dataclass(slots=True)
class Replay:
    """The whole story of some requests: tokens with scores, which `Opened` cannot hold, come as rows after it."""

    opened: list[Opened] = field(default_factory=list)
    rows: list[TokenRow] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)


class Ledger:
    """Records by request id, live and finished ones."""

    def __init__(self, max_retained: int = MAX_RETAINED) -> None:
        self._records: dict[int, Record] = {}
        self._finished: dict[int, None] = {}  # retained, oldest first
        self._max_retained = max_retained

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._records

    @property
    def num_retained(self) -> int:
        """Finished, not released."""
        return len(self._finished)

    @property
    def num_records(self) -> int:
        return len(self._records)

    def request_ids(self) -> list[int]:
        return list(self._records)

    def open(self, request_id: int, text_spec: bytes, output_ids: Iterable[int], *, with_scores: bool) -> None:
        """Begins a record; a resumed request already has `output_ids`."""
        output = array("i", output_ids)
        scores: list[TokenScores] | None = [] if with_scores else None
        self._records[request_id] = Record(request_id, text_spec, output, len(output), scores)

    def record(self, output: StepOutput, prompt_logprobs: Iterable[PromptLogprobs]) -> None:
        """Takes down what a step produced, except terminal records."""
        for row in output.rows:
            record = self._records[row.request_id]
            record.output_ids.extend(row.token_ids)
            if record.scores is not None and row.scores is not None:
                record.scores += row.scores
        for prompt in prompt_logprobs:
            self._records[prompt.request_id].prompt_logprobs = prompt

    def finish(self, finished: Finished) -> None:
        """Keeps the terminal record, or forgets the request where api has told already that it is done with it."""
        record = self._records[finished.request_id]
        record.finished = finished
        self._finished[finished.request_id] = None
        if record.released:
            self._forget(finished.request_id)
        elif len(self._finished) > self._max_retained:
            self._forget(next(iter(self._finished)))

    def release(self, request_id: int) -> bool:
        """Forgets a finished request. True where it still lives: then it is forgotten as soon as it ends."""
        record = self._records.get(request_id)
        if record is None:
            return False
        record.released = True
        if record.finished is None:
            return True
        self._forget(request_id)
        return False

    def overdue(self, now_ns: int) -> list[int]:
        """Requests that are to be told again because nobody has released them. Called about once a second.

        Those that were told often enough are forgotten: an api that still waits for one asks with the ids it has.
        """
        due: list[int] = []
        for request_id in list(self._finished):
            record = self._records[request_id]
            ended_ns = record.finished.finished_ns if record.finished is not None else 0
            if now_ns - ended_ns < RETELL_NS:
                break  # nor have the later ones waited long enough
            if now_ns - ended_ns >= RETELL_NS << record.num_retold:
                record.num_retold += 1
                due.append(request_id)
        forgotten = [request_id for request_id in due if self._records[request_id].num_retold > MAX_RETOLD]
        for request_id in forgotten:
            self._forget(request_id)
        return [request_id for request_id in due if request_id in self._records]

    def replay(self, request_ids: Iterable[int] = ()) -> Replay:
        """All that these requests (none named: all) have said so far."""
        replay = Replay()
        for request_id in list(request_ids) or list(self._records):
            record = self._records.get(request_id)
            if record is None:
                continue
            start = record.num_resumed if record.scores else len(record.output_ids)
            replay.opened.append(Opened(request_id, record.text_spec, pack_ids(record.output_ids[:start])))
            if record.scores:
                replay.rows.append(TokenRow(request_id, start, record.output_ids[start:].tolist(), record.scores))
            if record.prompt_logprobs is not None:
                replay.prompt_logprobs.append(record.prompt_logprobs)
            if record.finished is not None:
                replay.finished.append(record.finished)
        return replay

    def _forget(self, request_id: int) -> None:
        del self._records[request_id]
        del self._finished[request_id]
