"""One request's life inside the engine, and what a step makes of it. Plain data; owned by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

import msgspec

from nanoserve.ipc.messages import PROBE_PRIORITY, Finished, SamplingParams
from nanoserve.sched.plan import TokenScores
from nanoserve.sched.stop import RepetitionWatch

if TYPE_CHECKING:
    from nanoserve.sched.drafts import Drafting


class RequestStatus(IntEnum):
    WAITING = 0  # new, or preempted: holds no blocks
    RUNNING = 1
    FINISHED = 2


@dataclass(slots=True, eq=False)  # two requests are never equal: identity is what lists and maps compare
class Request:
    """`token_ids` is the prompt, then the output. KV exists for the first `num_computed_tokens` of them."""

    request_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    share_key: str = ""  # whose share of the engine it takes, with fair scheduling
    arrival_ns: int = 0
    # Set by the scheduler from here on.
    sequence: int = 0  # order of admission
    max_output_tokens: int = 0  # the smaller of max_tokens and what the context leaves
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None  # prefix cache hits when it first ran; None before that
    num_preemptions: int = 0
    num_bypasses: int = 0  # requests behind it that were started first because it did not fit
    block_ids: list[int] = field(default_factory=list)
    watch: RepetitionWatch | None = None  # of its output, where the client asked for it
    block_keys: list[bytes] = field(default_factory=list)  # of the full blocks of token_ids, as far as asked for
    num_registered_blocks: int = 0
    in_executor: bool = False  # the executor keeps state of it
    in_flight: bool = False  # a row of it is in the step that now runs
    prompt_scores: list[TokenScores] = field(default_factory=list)
    prompt_scores_done: bool = False
    scheduled_ns: int = 0
    first_token_ns: int = 0
    drafting: Drafting | None = None  # made when it first decodes, where speculation is on

    @property
    def is_probe(self) -> bool:
        """Whether it only proves that tokens come round."""
        return self.priority == PROBE_PRIORITY

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_scores(self) -> bool:
        return self.sampling.prompt_logprobs is not None and not self.prompt_scores_done

    def take_prompt_scores(self, scores: list[TokenScores]) -> list[PromptScoreRow]:
        """Gathers a chunk's scores; they come back whole, once, with the chunk that completes them."""
        num_scores = self.num_prompt_tokens - 1
        self.prompt_scores += scores
        if self.num_computed_tokens < num_scores:
            return []
        assert len(self.prompt_scores) == num_scores, f"{len(self.prompt_scores)} scores of {num_scores}"
        whole, self.prompt_scores, self.prompt_scores_done = self.prompt_scores, [], True
        return [PromptScoreRow(self.request_id, self.token_ids[: self.num_prompt_tokens], whole)]


class TokenRow(msgspec.Struct, gc=False):
    """New output tokens of one request; `scores` has one entry per token where they were asked for.

    A Struct, though it stays in the process: one is made per row and step, at a third of a dataclass's cost.
    """

    request_id: int
    first_index: int  # output index of the first of them
    token_ids: list[int]
    scores: list[TokenScores] | None = None


@dataclass(slots=True)
class PromptScoreRow:
    """Scores of a whole prompt: one entry per token after the first."""

    request_id: int
    token_ids: list[int]
    scores: list[TokenScores]


@dataclass(slots=True)
class StepOutput:
    """What one step produced, in the order of its rows. A request in `finished` has had its last row."""

    rows: list[TokenRow] = field(default_factory=list)
    prompt_scores: list[PromptScoreRow] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
