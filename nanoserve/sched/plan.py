"""What a step is: the plan that the scheduler makes and the result that an executor gives back.

Plain data, free of torch, so that it can be encoded and sent to tensor-parallel ranks one day. A request is
given a number of tokens; prefill, chunk, decode and resume are only names for that number. Results are ragged:
a row may yield no token (a chunk in the middle of its prompt), one, or several (speculation).

The executor keeps each running request's ids and block table between steps, so a plan carries changes only. What is
made per row and step is out of the collector's sight (`gc=False`): it holds no cycles, and there is much of it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from nanoserve.ipc.messages import SamplingParams


class NewRequest(msgspec.Struct, array_like=True):
    """State that the executor begins to keep; also sent again after a preemption dropped it."""

    request_id: int
    token_ids: list[int]  # prompt, then output so far
    num_prompt_tokens: int
    sampling: SamplingParams
    suppressed_until_min_tokens: tuple[int, ...] = ()  # ids masked while fewer than min_tokens are out


class PlanRow(msgspec.Struct, array_like=True, gc=False):
    """`num_tokens` tokens of one request, at positions start .. start+num_tokens-1.

    `samples` is true when the last of them is the request's newest token: then the row yields the next one.
    Block i of the request's table holds positions i*block_size .. (i+1)*block_size-1.

    Drafts, in rows that sample, are guesses of the tokens after the newest; they count in `num_tokens`. The row then
    yields what the request would have got without them in as many steps: the token drawn after the newest one, and
    while each equals the draft in its place, the token drawn after that draft. What is computed for the other drafts
    is void: their positions are computed again.
    """

    request_id: int
    start: int
    num_tokens: int
    new_block_ids: list[int]  # appended to the request's block table before the step
    samples: bool
    draft_token_ids: list[int] = []


class StepPlan(msgspec.Struct, array_like=True):
    step: int
    new_requests: list[NewRequest]
    rows: list[PlanRow]
    dropped: list[int]  # request ids whose state the executor forgets first (finished, aborted, preempted)


class TokenScores(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of one position, before temperature and after nothing (raw model scores)."""

    logprob: float
    rank: int  # 1 is the most likely
    top_ids: list[int]
    top_logprobs: list[float]


class RowError(msgspec.Struct, array_like=True, gc=False):
    request_id: int
    message: str


class StepTimes(msgspec.Struct, array_like=True, frozen=True):
    """Draws that a backend makes within its forward pass count there; `sample` is what is left to do with them."""

    build_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0


class StepResult(msgspec.Struct, array_like=True):
    """Rows in the order of the plan. A row in `errors` yields no token and ends its request alone.

    The executor appends a row's tokens to the ids it keeps. Of a row that yields several, the scheduler counts only
    the plan's positions as computed, without the drafts that were wrong, so the next row of that request computes the
    others again.
    """

    num_tokens: list[int]  # per row of the plan
    token_ids: list[int]  # ragged, rows one after the other
    scores: dict[int, list[TokenScores]] = {}  # request_id -> one per token of its row, where asked for
    prompt_scores: dict[int, list[TokenScores]] = {}  # request_id -> positions start+1 .. of this chunk
    errors: list[RowError] = []
    times: StepTimes = StepTimes()


class Executor(Protocol):
    """Runs plans. One owner of weights and KV memory; the scheduler never sees either."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs one step. Raises only when the whole step failed; a broken row goes into `errors`.

        A plan without rows only drops state. Ids in `dropped` that the executor does not know (their step failed
        before it took them in) are passed over.
        """
        ...

    def close(self) -> None: ...
