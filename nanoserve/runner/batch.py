"""The running requests as columns: built once per request, kept, and only indexed in each step.

Owner: the engine process; `model_runner` is the only caller. A request holds one index into all columns ("place")
from its NewRequest until it is dropped. Building a step's arrays is a handful of numpy calls, whatever the number
of rows, so that the host's share of a step stays small.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import numpy as np

from nanoserve.runner.backend import ForwardBatch
from nanoserve.runner.logit_edits import LogitEdits
from nanoserve.runner.sampler import GREEDY_TEMPERATURE, SAMPLE_ROW, SampleRows
from nanoserve.sched.plan import NewRequest, PlanRow, RowError

_NO_SCORES = -1
_NONE = np.empty(0, dtype=np.int32)
_SPARE_BLOCKS = 4  # by which the kept tables of a step are wider than they must be


@dataclass(slots=True)
class _Columns:
    """One entry per place."""

    token_ids: np.ndarray  # int32 [places, max_tokens]
    block_tables: np.ndarray  # int32 [places, max_blocks]
    num_tokens: np.ndarray  # int64, prompt and output
    num_prompt: np.ndarray  # int64
    num_blocks: np.ndarray  # int64
    sampling: np.ndarray  # SAMPLE_ROW; position and logit_row mean nothing yet
    num_logprobs: np.ndarray  # int64; _NO_SCORES where none are asked for
    num_prompt_logprobs: np.ndarray
    greedy: np.ndarray  # bool; nothing but the largest logit is asked for

    @classmethod
    def empty(cls, places: int, max_tokens: int, max_blocks: int) -> _Columns:
        # empty, not zeros, where memory is large: only what requests fill becomes resident.
        return cls(
            token_ids=np.empty((places, max_tokens), dtype=np.int32),
            block_tables=np.zeros((places, max_blocks), dtype=np.int32),
            num_tokens=np.zeros(places, dtype=np.int64),
            num_prompt=np.zeros(places, dtype=np.int64),
            num_blocks=np.zeros(places, dtype=np.int64),
            sampling=np.zeros(places, dtype=SAMPLE_ROW),
            num_logprobs=np.full(places, _NO_SCORES, dtype=np.int64),
            num_prompt_logprobs=np.full(places, _NO_SCORES, dtype=np.int64),
            greedy=np.zeros(places, dtype=bool),
        )

    def grown(self) -> _Columns:
        """Twice the places, the old ones first."""
        names = self.__dataclass_fields__
        return _Columns(*(np.concatenate((column, column)) for column in (getattr(self, name) for name in names)))


@dataclass(slots=True)
class StepRows:
    """The rows of a plan that can run, ready for the backend and the sampler."""

    forward: ForwardBatch
    plan_index: np.ndarray  # int64 [R] index of each row in the plan
    places: np.ndarray  # int64 [R]
    starts: np.ndarray  # int64 [R]
    counts: np.ndarray  # int64 [R]
    sampled: np.ndarray  # int64 [S] row of each position a token is drawn at, ascending; 1 + drafts a row that yields
    ahead: np.ndarray  # int64 [S] drafts of its row up to that position
    drafts: dict[int, list[int]]  # by row, where it has some
    sampled_logits: np.ndarray  # int64 [S]: their rows of the logits
    prompt_scored: np.ndarray  # int64: rows whose prompt positions are scored
    logit_index: np.ndarray | None  # int64 [T] row of the logits of each flat token, where prompts are scored
    greedy: bool  # no row asks for anything but the largest logit
    scored: bool  # log-probabilities are asked for, of drawn tokens or of prompts


class _Decodes:
    """A step of requests that each compute their newest token alone. It is kept: while the same requests decode, the
    next one differs in tokens, positions and now and then a block.

    No prompt position is scored there: a row that yields ends at or behind the last one.
    """

    __slots__ = ("places", "request_ids", "room", "step")

    def __init__(self, request_ids: list[int], places: list[int], plan_index: np.ndarray, columns: _Columns) -> None:
        self.request_ids = request_ids
        self.places = places
        self.room: list[int] = []  # positions that the row's blocks hold
        count = len(places)
        rows, row_starts, place_array = np.arange(count), np.arange(count + 1, dtype=np.int32), np.array(places)
        forward = ForwardBatch(_NONE, _NONE, row_starts, _NONE, _NONE, logit_tokens=row_starts[:-1])
        self.step = StepRows(
            forward=forward,
            plan_index=plan_index,
            places=place_array,
            starts=_NONE,
            counts=np.ones(count, dtype=np.int64),
            sampled=rows,
            ahead=np.zeros(count, dtype=np.int64),
            drafts={},
            sampled_logits=rows,
            prompt_scored=rows[:0],
            logit_index=None,
            greedy=bool(columns.greedy[place_array].all()),
            scored=bool((columns.num_logprobs[place_array] != _NO_SCORES).any()),
        )

    def take_all_blocks(self, columns: _Columns, block_size: int) -> None:
        num_blocks = columns.num_blocks[self.step.places].tolist()
        self.room = [count * block_size for count in num_blocks]
        self.step.forward.block_tables = columns.block_tables[self.step.places, : max(num_blocks) + _SPARE_BLOCKS]

    def take_blocks(self, index: int, columns: _Columns, block_size: int) -> None:
        """Those of one row."""
        place, tables = self.places[index], self.step.forward.block_tables
        num_blocks = int(columns.num_blocks[place])
        if num_blocks > tables.shape[1]:
            self.take_all_blocks(columns, block_size)
        else:
            self.room[index] = num_blocks * block_size
            tables[index] = columns.block_tables[place, : tables.shape[1]]


class RequestTable:
    """State of the running requests. Grows past `max_seqs` by doubling, should the scheduler hold more."""

    def __init__(self, *, max_seqs: int, max_tokens: int, block_size: int, vocab_size: int) -> None:
        self._block_size = block_size
        self._vocab_size = vocab_size
        max_blocks = -(-max_tokens // block_size)
        self._columns = _Columns.empty(max(1, max_seqs), max_tokens, max_blocks)
        self._free = list(range(max(1, max_seqs)))[::-1]
        self._places: dict[int, int] = {}
        self._broken: dict[int, str] = {}  # request id -> why it cannot run
        self._edits: dict[int, LogitEdits] = {}  # by place
        self._kept: _Decodes | None = None  # the last step, where it was one of these

    def __len__(self) -> int:
        return len(self._places) + len(self._broken)

    def drop(self, request_id: int) -> None:
        """Forgets a request; an unknown id is nothing to forget."""
        self._kept = None
        self._broken.pop(request_id, None)
        place = self._places.pop(request_id, None)
        if place is not None:
            self._edits.pop(place, None)
            self._free.append(place)

    def add(self, request: NewRequest) -> None:
        """Begins to keep a request. One that cannot run is kept as broken: its rows become errors."""
        self.drop(request.request_id)
        if reason := self._reason_against(request):
            self._broken[request.request_id] = reason
            return
        if not self._free:
            places = len(self._columns.num_tokens)
            self._columns = self._columns.grown()
            self._free = list(range(places, 2 * places))[::-1]
        place = self._places[request.request_id] = self._free.pop()
        columns, sampling = self._columns, request.sampling
        columns.token_ids[place, : len(request.token_ids)] = request.token_ids
        columns.num_tokens[place] = len(request.token_ids)
        columns.num_prompt[place] = request.num_prompt_tokens
        columns.num_blocks[place] = 0
        columns.sampling[place] = (
            sampling.seed, 0, sampling.top_k, 0, sampling.temperature, sampling.top_p, sampling.min_p,
        )  # fmt: skip
        columns.num_logprobs[place] = _NO_SCORES if sampling.logprobs is None else sampling.logprobs
        columns.num_prompt_logprobs[place] = (
            _NO_SCORES if sampling.prompt_logprobs is None else sampling.prompt_logprobs
        )
        columns.greedy[place] = sampling.temperature < GREEDY_TEMPERATURE and sampling.logprobs is None
        if LogitEdits.needed(request):
            self._edits[place] = LogitEdits(request)
            columns.greedy[place] = False

    def _reason_against(self, request: NewRequest) -> str:
        ids, sampling = request.token_ids, request.sampling
        if not ids:
            return "the prompt is empty"
        if len(ids) > self._columns.token_ids.shape[1]:
            return "the request is longer than the context"
        named = [min(ids), max(ids), *sampling.logit_bias, *request.suppressed_until_min_tokens]
        named += [token for word in sampling.bad_words for token in word]
        if min(named) < 0 or max(named) >= self._vocab_size:
            return "a token id is outside the vocabulary"
        return ""

    def build(self, plan_rows: list[PlanRow], errors: list[RowError]) -> StepRows | None:
        """The step's arrays; None when no row can run. Rows that cannot are told in `errors`.

        Appends the plan's new blocks to the tables. ValueError when a row reaches past its tokens or its blocks:
        then the plan is wrong, and running it could write into another request's memory.
        """
        request_ids = [row.request_id for row in plan_rows]
        is_decode = all(row.num_tokens == 1 and row.samples for row in plan_rows)
        kept = self._kept
        if is_decode and kept is not None and kept.request_ids == request_ids:
            for index in self._append_blocks(plan_rows, kept.places):
                kept.take_blocks(index, self._columns, self._block_size)
            return self._build_decodes(kept, plan_rows)
        self._kept = None  # it does not see what becomes of its requests in other steps
        plan_index, places = self._find(plan_rows, errors)
        if not places:
            return None
        chosen = [plan_rows[index] for index in plan_index]
        self._append_blocks(chosen, places)
        if not is_decode:
            return self._build_any(chosen, np.array(plan_index, dtype=np.int64), np.array(places, dtype=np.int64))
        kept = _Decodes(request_ids, places, np.array(plan_index, dtype=np.int64), self._columns)
        kept.take_all_blocks(self._columns, self._block_size)
        if len(places) == len(plan_rows):  # rows that cannot run are told of in each step
            self._kept = kept
        return self._build_decodes(kept, chosen)

    def _build_decodes(self, kept: _Decodes, rows: list[PlanRow]) -> StepRows:
        """What `_build_any` gives where each row is its newest token alone: most steps, in a fraction of the time."""
        step, columns = kept.step, self._columns
        starts = columns.num_tokens[step.places] - 1
        positions = starts.tolist()  # plain numbers: less code to fetch after a step that left none in cache
        if positions != [row.start for row in rows]:
            raise ValueError("a row of the plan reaches past its request's tokens")
        if any(map(operator.ge, positions, kept.room)):
            raise ValueError("a row of the plan reaches past its request's blocks")
        step.starts = starts
        step.forward.token_ids = columns.token_ids[step.places, starts]
        step.forward.positions = starts.astype(np.int32)
        step.forward.context_lens = step.forward.positions + 1
        return step

    def _check_reach(
        self, places: np.ndarray, starts: np.ndarray, ends: np.ndarray, num_drafts: np.ndarray | int = 0
    ) -> None:
        columns = self._columns
        if (ends - num_drafts > columns.num_tokens[places]).any() or (ends <= starts).any() or (starts < 0).any():
            raise ValueError("a row of the plan reaches past its request's tokens")
        if (ends > columns.num_blocks[places] * self._block_size).any():
            raise ValueError("a row of the plan reaches past its request's blocks")

    def _build_any(self, chosen: list[PlanRow], plan_index: np.ndarray, places: np.ndarray) -> StepRows:
        columns = self._columns
        starts = np.array([row.start for row in chosen], dtype=np.int64)
        counts = np.array([row.num_tokens for row in chosen], dtype=np.int64)
        ends = starts + counts
        drafts = self._write_drafts(chosen, places)
        num_drafts = np.zeros(len(places), dtype=np.int64)
        num_drafts[list(drafts)] = [len(ids) for ids in drafts.values()]
        self._check_reach(places, starts, ends, num_drafts)
        row_starts = np.zeros(len(places) + 1, dtype=np.int32)
        np.cumsum(counts, out=row_starts[1:])
        rows = np.repeat(np.arange(len(places)), counts)
        positions = np.arange(len(rows)) - row_starts[rows] + starts[rows]
        width = int(columns.num_blocks[places].max())
        yielding = np.flatnonzero([row.samples for row in chosen])
        sampled = np.repeat(yielding, 1 + num_drafts[yielding])
        ahead = np.arange(len(sampled)) - np.searchsorted(sampled, sampled)
        scored = np.flatnonzero(columns.num_prompt_logprobs[places] != _NO_SCORES)
        scored = scored[starts[scored] + 1 < columns.num_prompt[places[scored]]]
        drawn_after = (row_starts[sampled + 1] - 1 - num_drafts[sampled] + ahead).astype(np.int32)
        logit_tokens, logit_index = drawn_after, None
        if len(scored):
            wanted = np.isin(rows, scored)
            wanted[drawn_after] = True
            logit_tokens, logit_index = np.flatnonzero(wanted).astype(np.int32), np.cumsum(wanted) - 1
        forward = ForwardBatch(
            token_ids=columns.token_ids[places[rows], positions],
            positions=positions.astype(np.int32),
            row_starts=row_starts,
            context_lens=ends.astype(np.int32),
            block_tables=columns.block_tables[places, :width],
            logit_tokens=logit_tokens,
        )
        sampled_logits = np.arange(len(sampled)) if logit_index is None else logit_index[drawn_after]
        greedy = not len(scored) and bool(columns.greedy[places[sampled]].all())
        return StepRows(
            forward=forward,
            plan_index=plan_index,
            places=places,
            starts=starts,
            counts=counts,
            sampled=sampled,
            ahead=ahead,
            drafts=drafts,
            sampled_logits=sampled_logits,
            prompt_scored=scored,
            logit_index=logit_index,
            greedy=greedy,
            scored=bool(len(scored) or (columns.num_logprobs[places] != _NO_SCORES).any()),
        )

    def _write_drafts(self, rows: list[PlanRow], places: np.ndarray) -> dict[int, list[int]]:
        """Drafts by row, written behind the tokens of their requests; `append` may overwrite them."""
        columns = self._columns
        drafts = {row: plan_row.draft_token_ids for row, plan_row in enumerate(rows) if plan_row.draft_token_ids}
        for row, ids in drafts.items():
            begin = int(columns.num_tokens[places[row]])
            if begin + len(ids) > columns.token_ids.shape[1]:
                raise ValueError("a row of the plan has drafts past the context")
            columns.token_ids[places[row], begin : begin + len(ids)] = ids
        return drafts

    def _find(self, plan_rows: list[PlanRow], errors: list[RowError]) -> tuple[list[int], list[int]]:
        """Plan indices and places of the rows that can run."""
        plan_index, places = [], []
        for index, row in enumerate(plan_rows):
            place = self._places.get(row.request_id)
            if place is None:
                errors.append(RowError(row.request_id, self._broken.get(row.request_id, "unknown request")))
            else:
                plan_index.append(index)
                places.append(place)
        return plan_index, places

    def _append_blocks(self, rows: list[PlanRow], places: list[int]) -> list[int]:
        """The plan's new blocks into the tables; which rows got some."""
        columns = self._columns
        grown = [index for index, row in enumerate(rows) if row.new_block_ids]
        for index in grown:
            new_block_ids, place = rows[index].new_block_ids, places[index]
            begin = int(columns.num_blocks[place])
            end = begin + len(new_block_ids)
            if end > columns.block_tables.shape[1]:
                raise ValueError("a request got more blocks than the context can use")
            columns.block_tables[place, begin:end] = new_block_ids
            columns.num_blocks[place] = end
        return grown

    def sample_rows(self, rows: StepRows) -> SampleRows:
        """What the requests ask of the sampler at the positions drawn; drafts count as output of those after them."""
        columns, places = self._columns, rows.places[rows.sampled]
        positions = columns.num_tokens[places] - columns.num_prompt[places] + rows.ahead
        edits: list[tuple[int, LogitEdits, int]] = []
        if self._edits:
            for index, (place, ahead) in enumerate(zip(places.tolist(), rows.ahead.tolist(), strict=True)):
                if place in self._edits:
                    edit = self._edits[place]
                    if ahead:
                        edit = edits[-1][1].after(rows.drafts[int(rows.sampled[index])][ahead - 1])
                    edits.append((index, edit, int(positions[index])))
        asked = columns.sampling[places]
        asked["position"], asked["logit_row"] = positions, rows.sampled_logits
        return SampleRows(asked, edits)

    def append(self, places: np.ndarray, ahead: np.ndarray, token_ids: np.ndarray) -> None:
        """New tokens of each place in order, ahead[i] others before token i; what lies past the context is left out."""
        columns = self._columns
        positions = columns.num_tokens[places] + ahead
        if max(positions.tolist(), default=0) >= columns.token_ids.shape[1]:
            inside = positions < columns.token_ids.shape[1]
            places, positions, token_ids = places[inside], positions[inside], token_ids[inside]
        columns.token_ids[places, positions] = token_ids
        columns.num_tokens[places] = positions + 1  # of several tokens of a place the last one counts
        if self._edits:
            for place, token in zip(places.tolist(), token_ids.tolist(), strict=True):
                if place in self._edits:
                    self._edits[place].append(token)

    def num_logprobs(self, places: np.ndarray) -> np.ndarray:
        """How many top log-probabilities each place asks for; -1: none, and none of the token itself."""
        counts: np.ndarray = self._columns.num_logprobs[places]
        return counts

    def prompt_targets(self, place: int, start: int, count: int) -> tuple[np.ndarray, int]:
        """Prompt ids at start+1 .. start+count (as far as the prompt goes), and how many top scores are asked for."""
        columns = self._columns
        end = min(start + count + 1, int(columns.num_prompt[place]))
        return columns.token_ids[place, start + 1 : end].astype(np.int64), int(columns.num_prompt_logprobs[place])
