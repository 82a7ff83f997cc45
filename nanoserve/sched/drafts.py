"""Speculation by prompt lookup: which rows of a step get drafts, how many, and what became of them. Pure.

Owned by the scheduler. A draft is a guess of a token to come; the executor computes it beside the newest token and
keeps those that it would have drawn itself (`sched.plan.PlanRow`). So drafts change when tokens come, never which.

A draft costs a token's share of the step and saves, where it is right, a whole step of its request. Drafts come last in
a step: they take no token, block or seat that a prompt or another stream could use, and preempt nobody. And a request
has to earn them: first its drafts are only compared with what comes, which costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

from nanoserve.sched.block_tables import BlockTables
from nanoserve.sched.ngram import NgramIndex
from nanoserve.sched.plan import PlanRow
from nanoserve.sched.request import Request

# What a step costs before its first token, in tokens: reading the weights, against the arithmetic of one more token.
# Measured with bench.steps on two cores; a GPU's is larger, so there this drafts too little rather than too much.
STEP_COST_TOKENS = 6
# While a token's arithmetic is done, memory could give a byte for so many parameters (the same cores; the weights read
# above are 4-bit ones). So reading the keys and values of a long context can cost a row more than its arithmetic.
PARAMETERS_PER_BYTE = 11
# A draft has to be right so many times as often as would just pay: its cost is certain, its use is not, and tokens that
# come in lumps are a cost too. With it, three streams of short contexts are the most that get drafts.
MARGIN = 2.5
# Before anything is known, a draft is expected right this often, as if that had been seen in so many tries.
PRIOR_RATE = 0.25
PRIOR_TRIES = 2.0
DECAY = 0.9  # of what is known, with each try
# Tokens that a step enters into new indexes, or one request's whole text: half a microsecond each, and the step waits.
MOST_INDEXED = 2000


def context_cost(context_bytes: int, num_parameters: int) -> float:
    """What each token of context costs a row, in tokens computed: the bytes it reads of it, by the model's size."""
    return context_bytes * PARAMETERS_PER_BYTE / num_parameters if num_parameters else 0.0


@dataclass(slots=True)
class Drafting:
    """What is known about one request's drafts."""

    index: NgramIndex
    num_right: float = 0.0
    num_tried: float = 0.0
    guess: tuple[int, int] | None = None  # a draft that was not computed: its position in the text, and its id

    @property
    def rate(self) -> float:
        """How likely a draft is right, the ones before it being right. Strictly between 0 and 1."""
        return (self.num_right + PRIOR_RATE * PRIOR_TRIES) / (self.num_tried + PRIOR_TRIES)

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Drafts after the first wrong one tell nothing."""
        self.num_right = DECAY * self.num_right + num_accepted
        self.num_tried = DECAY * self.num_tried + min(num_accepted + 1, num_drafts)

    def check_guess(self, token_ids: Sequence[int]) -> None:
        """Learns from the draft that was not computed, now that its place in the text is taken."""
        if self.guess is not None and self.guess[0] < len(token_ids):
            position, token_id = self.guess
            self.learn(1, int(token_ids[position] == token_id))
            self.guess = None


class Drafter:
    """`num_draft_tokens`: most drafts of a row, 0 is none at all; `shortest_match`: ids that must have stood before;
    `context_cost`: as of the function of that name."""

    def __init__(self, num_draft_tokens: int, shortest_match: int, context_cost: float) -> None:
        self._num_draft_tokens = num_draft_tokens
        self._shortest_match = shortest_match
        self._context_cost = context_cost
        self.num_drafts = 0  # totals, of the steps that have ended
        self.num_right = 0

    def add_drafts(
        self, rows: list[PlanRow], running: dict[int, Request], tables: BlockTables, max_num_tokens: int
    ) -> None:
        """Appends drafts to the rows of a plan that compute one token, as far as tokens and blocks are left over."""
        if not self._num_draft_tokens:
            return
        budget = max_num_tokens - sum(row.num_tokens for row in rows)
        to_index = MOST_INDEXED
        for row in rows:
            if budget <= 0:
                break
            # A right draft is worth a row's share of the step, and costs one token. Prompts beside it make a step
            # longer and drafts cheaper, but what then comes together comes late: they do not count. Worth it from:
            threshold = MARGIN / (1 + STEP_COST_TOKENS / len(rows) + row.start * self._context_cost)
            if threshold >= 1.0 or not row.samples or row.num_tokens > 1:
                continue
            request = running[row.request_id]
            if request.drafting is None:
                num_tokens = len(request.token_ids)
                if to_index < MOST_INDEXED and num_tokens > to_index:
                    continue  # in a later step
                request.drafting = Drafting(NgramIndex(self._shortest_match))
                to_index -= num_tokens
            budget -= self._draft(request, request.drafting, row, tables, budget, threshold, len(running))

    def _draft(
        self,
        request: Request,
        drafting: Drafting,
        row: PlanRow,
        tables: BlockTables,
        budget: int,
        threshold: float,
        num_spare: int,
    ) -> int:
        drafting.check_guess(request.token_ids)
        # The token after the last draft is drawn too, and must be one that the request may still have.
        wanted = min(self._num_draft_tokens, request.max_output_tokens - request.num_output_tokens - 1, budget)
        drafts = drafting.index.propose(request.token_ids, wanted)
        if not drafts:
            return 0
        worth = int(log(threshold) / log(drafting.rate))  # rate ** worth >= threshold
        count = min(len(drafts), worth, tables.room_for(request, 1 + len(drafts), num_spare) - 1)
        if count <= 0:
            drafting.guess = len(request.token_ids), drafts[0]
            return 0
        new_block_ids = tables.grow(request, 1 + count)
        assert new_block_ids is not None, "there was room"
        row.new_block_ids += new_block_ids
        row.num_tokens += count
        row.draft_token_ids = drafts[:count]
        return count

    def num_accepted(self, request: Request, draft_token_ids: list[int], new_ids: list[int]) -> int:
        """How many drafts a row's new tokens confirm: KV of so many more tokens is valid. Learns from it.

        The last new token is never among them: it was drawn, not computed. What the other drafts left behind, in
        blocks that the request keeps, is void, and written again before anything reads it.
        """
        accepted = 0
        for draft, token in zip(draft_token_ids, new_ids[:-1], strict=False):
            if draft != token:
                break
            accepted += 1
        assert request.drafting is not None, f"request {request.request_id} has no drafts"
        request.drafting.learn(len(draft_token_ids), accepted)
        self.num_drafts += len(draft_token_ids)
        self.num_right += accepted
        return accepted
