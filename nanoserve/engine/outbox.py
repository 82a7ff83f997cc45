"""Builds the one `TokenBatch` of a step, columns and all. Owned by `EngineCore`; sends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import (
    Accepted,
    EngineStats,
    Finished,
    Opened,
    PromptLogprobs,
    RowLogprobs,
    TokenBatch,
)
from nanoserve.sched.plan import TokenScores
from nanoserve.sched.request import PromptScoreRow, TokenRow


def row_logprobs(row: int, scores: Sequence[TokenScores]) -> RowLogprobs:
    """Scores of one row's tokens as columns."""
    return RowLogprobs(
        row=row,
        logprobs=[score.logprob for score in scores],
        ranks=[score.rank for score in scores],
        top_ids=[score.top_ids for score in scores],
        top_logprobs=[score.top_logprobs for score in scores],
    )


def prompt_logprobs(prompt: PromptScoreRow) -> PromptLogprobs:
    """Scores of a whole prompt; its first token has none."""
    rest = row_logprobs(-1, prompt.scores)
    scores = RowLogprobs(
        row=-1,
        logprobs=[None, *rest.logprobs],
        ranks=[0, *rest.ranks],
        top_ids=[[], *rest.top_ids],
        top_logprobs=[[], *rest.top_logprobs],
    )
    return PromptLogprobs(prompt.request_id, pack_ids(prompt.token_ids), scores)


class BatchBuilder:
    """Gathers what is to be told next. `take` hands it over and begins anew."""

    def __init__(self, engine_index: int, incarnation: int, clock: Callable[[], int]) -> None:
        self._engine_index = engine_index
        self._incarnation = incarnation
        self._clock = clock
        self._clear()

    def _clear(self) -> None:
        self.accepted: list[Accepted] = []
        self.opened: list[Opened] = []
        self.rows: list[TokenRow] = []
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.finished: list[Finished] = []
        self.stats_due = False  # somebody waits for the stats

    @property
    def is_empty(self) -> bool:
        return not self.stats_due and not (
            self.accepted or self.opened or self.rows or self.prompt_logprobs or self.finished
        )

    def extend(
        self,
        *,
        opened: Iterable[Opened] = (),
        rows: Iterable[TokenRow] = (),
        prompt_logprobs: Iterable[PromptLogprobs] = (),
        finished: Iterable[Finished] = (),
    ) -> None:
        self.opened += opened
        self.rows += rows
        self.prompt_logprobs += prompt_logprobs
        self.finished += finished

    def take(self, step: int, stats: EngineStats | None) -> TokenBatch:
        rows = self.rows
        batch = TokenBatch(
            engine_index=self._engine_index,
            incarnation=self._incarnation,
            step=step,
            request_ids=[row.request_id for row in rows],
            first_index=[row.first_index for row in rows],
            num_tokens=[len(row.token_ids) for row in rows],
            token_ids=pack_ids(chain.from_iterable(row.token_ids for row in rows)),
            accepted=self.accepted,
            opened=self.opened,
            logprobs=[row_logprobs(index, row.scores) for index, row in enumerate(rows) if row.scores is not None],
            prompt_logprobs=self.prompt_logprobs,
            finished=self.finished,
            stats=stats,
            sent_ns=self._clock(),
        )
        self._clear()
        return batch
