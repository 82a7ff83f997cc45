"""How many tokens a step computes, and how many of them may be of prompts. Pure; used by the scheduler.

A step takes as long as its tokens, so a prompt of hundreds of tokens beside streams holds each of them up. While
streams decode, the prompts' share of a step is therefore bound: to some tokens, and some more for each stream, whose
own token takes time too, and for each request that waits for its first token. So a step takes at most a few times as
long as without prompts, whatever the model and the machine. The bound is counted in tokens, not in measured time, so
that a plan depends on its requests alone.

Where as many requests wait for their first token as streams are under way, or more (a burst, a start), there is no
bound: a long step then shortens at least as many waits as it lengthens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nanoserve.sched.admission import SchedulerLimits
from nanoserve.sched.request import Request


@dataclass(slots=True)
class StepBudget:
    """Tokens that are left: `total`, and how many of them a request may have that computes more than its newest."""

    total: int
    prompts: int
    kept: int = 0  # a token beside these, for a probe

    @classmethod
    def of_step(cls, limits: SchedulerLimits, running: Iterable[Request], num_waiting: int) -> StepBudget:
        total = limits.max_num_batched_tokens
        if not limits.prompt_tokens_per_stream:
            return cls(total, total)
        num_running = num_streams = 0
        for request in running:
            num_running += 1
            num_streams += len(request.token_ids) - request.num_computed_tokens == 1
        num_starting = num_running - num_streams + min(num_waiting, limits.max_num_running - num_running)
        if num_starting >= num_streams:
            return cls(total, total)
        share = limits.base_prompt_tokens + limits.prompt_tokens_per_stream * (num_streams + num_starting)
        return cls(total, min(share, total))

    def grant(self, wanted: int) -> int:
        """How many of the tokens that a running request wants it may have; 0 is none in this step."""
        return min(wanted, self.total if wanted == 1 else self.prompts)

    def keep_for_probe(self, waiting: Sequence[Request]) -> None:
        """Where a probe of health waits, its token is not taken by those that run."""
        if waiting and waiting[0].is_probe:
            self.kept = 1
            self.take(1)

    def for_start(self, request: Request, num_running: int, limits: SchedulerLimits) -> int:
        """With how many tokens at most a waiting request may begin; 0: not in this step. A probe has its own seat."""
        if request.is_probe and self.kept:
            self.give_back(self.kept)
            self.kept = 0
            return 1
        return self.prompts if num_running < limits.max_num_running else 0

    def take(self, num_tokens: int) -> None:
        self.total -= num_tokens
        if num_tokens > 1:
            self.prompts -= num_tokens
        self.prompts = min(self.prompts, self.total)

    def give_back(self, num_tokens: int) -> None:
        """Of a row that is planned no more."""
        self.total += num_tokens
        if num_tokens > 1:
            self.prompts += num_tokens
