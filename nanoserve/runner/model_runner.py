"""The executor of a real model: a plan in, tokens out. Owner: the engine process, called once per step.

forget and begin requests -> arrays of the step -> forward -> scores and tokens -> append to the kept state
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from nanoserve.runner.backend import ForwardBackend
from nanoserve.runner.batch import RequestTable, StepRows
from nanoserve.runner.sampler import add_edited
from nanoserve.runner.scores import score_tokens
from nanoserve.sched.plan import RowError, StepPlan, StepResult, StepTimes, TokenScores

_NOTHING_TO_DRAW = "no token can be drawn: the logits are not numbers, or every id is ruled out"


@dataclass(slots=True)
class _Drawn:
    """The tokens of a step that count; columns [N], a row's tokens one after the other."""

    rows: np.ndarray  # int64, of the StepRows
    ahead: np.ndarray  # int64 tokens of the same row before this one
    logits: np.ndarray  # int64 row of the logits it was drawn from
    token_ids: np.ndarray  # -1: nothing could be drawn; only a row's first token

    @property
    def broken(self) -> np.ndarray:
        broken: np.ndarray = self.token_ids < 0
        return broken

    def only(self, which: np.ndarray) -> _Drawn:
        return _Drawn(*(column[which] for column in (self.rows, self.ahead, self.logits, self.token_ids)))


class ModelRunner:
    """`Executor` over one backend, whose KV memory is already allocated."""

    def __init__(self, backend: ForwardBackend, table: RequestTable) -> None:
        self._backend = backend
        self._table = table

    def execute(self, plan: StepPlan) -> StepResult:
        began = time.perf_counter()
        for request_id in plan.dropped:
            self._table.drop(request_id)
        for request in plan.new_requests:
            self._table.add(request)
        result = StepResult(num_tokens=[0] * len(plan.rows), token_ids=[], scores={}, prompt_scores={}, errors=[])
        rows = self._table.build(plan.rows, result.errors)
        prepared = time.perf_counter()
        if rows is None:
            result.times = StepTimes(prepared - began)
            return result
        if rows.greedy:
            token_ids: np.ndarray = self._backend.forward_greedy(rows.forward)
            forwarded = time.perf_counter()
            drawn = _accepted(rows, token_ids)
        else:
            asked = self._table.sample_rows(rows)
            token_ids, logits = self._backend.forward_drawn(rows.forward, asked.without_edits())
            forwarded = time.perf_counter()
            if asked.edits:
                with torch.inference_mode():
                    token_ids = add_edited(token_ids, logits, asked, self._backend.choose)
            drawn = _accepted(rows, token_ids)
            if rows.scored:
                with torch.inference_mode():
                    self._score(plan, rows, drawn, logits, result)
        self._take(plan, rows, drawn, result)
        result.times = StepTimes(prepared - began, forwarded - prepared, time.perf_counter() - forwarded)
        return result

    def close(self) -> None:
        """Ends the backend's threads and gives the memory of keys and values back."""
        self._backend.close()

    def _take(self, plan: StepPlan, rows: StepRows, drawn: _Drawn, result: StepResult) -> None:
        """Tokens into the result and the kept state; a row without one becomes an error."""
        token_ids = drawn.token_ids.tolist()
        if token_ids and min(token_ids) < 0:
            for index in rows.plan_index[drawn.rows[drawn.broken]].tolist():
                result.errors.append(RowError(plan.rows[index].request_id, _NOTHING_TO_DRAW))
            drawn = drawn.only(~drawn.broken)
            token_ids = drawn.token_ids.tolist()
        for index in rows.plan_index[drawn.rows].tolist():
            result.num_tokens[index] += 1
        result.token_ids = token_ids
        self._table.append(rows.places[drawn.rows], drawn.ahead, drawn.token_ids)

    def _score(self, plan: StepPlan, rows: StepRows, drawn: _Drawn, logits: torch.Tensor, result: StepResult) -> None:
        if len(rows.prompt_scored):
            self._score_prompts(plan, rows, logits, result)
        num_top = self._table.num_logprobs(rows.places[drawn.rows])
        asking = np.flatnonzero((num_top >= 0) & ~drawn.broken)
        if not len(asking):
            return
        scores = score_tokens(logits, drawn.logits[asking], drawn.token_ids[asking], int(num_top[asking].max()))
        for index, score in zip(asking.tolist(), scores, strict=True):
            request_id = plan.rows[rows.plan_index[drawn.rows[index]]].request_id
            result.scores.setdefault(request_id, []).append(_trimmed(score, int(num_top[index])))

    def _score_prompts(self, plan: StepPlan, rows: StepRows, logits: torch.Tensor, result: StepResult) -> None:
        assert rows.logit_index is not None
        for row in rows.prompt_scored.tolist():
            targets, num_top = self._table.prompt_targets(
                int(rows.places[row]), int(rows.starts[row]), int(rows.counts[row])
            )
            first = int(rows.forward.row_starts[row])
            where = rows.logit_index[first : first + len(targets)]
            request_id = plan.rows[rows.plan_index[row]].request_id
            result.prompt_scores[request_id] = score_tokens(logits, where, targets, num_top)


def _accepted(rows: StepRows, token_ids: np.ndarray) -> _Drawn:
    """Leaves out what was drawn after a wrong draft, or where nothing could be drawn after a right one.

    Of the latter the request hears in its next step, as it would have without drafts. Each token was drawn with the
    uniform number of its own output position, from logits and counts that hold the drafts before it; if those are
    right, it is the token of a step without drafts. Comparing is all there is to acceptance, sampled or greedy.
    """
    every = _Drawn(rows.sampled, rows.ahead, rows.sampled_logits, token_ids)
    if not rows.drafts:
        return every
    broken = every.broken
    kept = np.ones(len(rows.sampled), dtype=bool)
    for row, drafts in rows.drafts.items():
        first = int(np.searchsorted(rows.sampled, row))
        end = first + 1 + len(drafts)
        wrong = np.flatnonzero((token_ids[first : end - 1] != drafts) | broken[first : end - 1])
        if len(wrong):
            kept[first + 1 + int(wrong[0]) : end] = False
        kept[first + 1 : end] &= ~broken[first + 1 : end]
    return every.only(kept)


def _trimmed(score: TokenScores, num_top: int) -> TokenScores:
    return TokenScores(score.logprob, score.rank, score.top_ids[:num_top], score.top_logprobs[:num_top])
