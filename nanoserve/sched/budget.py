"""How many tokens a step computes, and how many of them may be of prompts. Pure; used by the scheduler.

A step takes as long as its tokens, so a prompt of hundreds of tokens beside streams holds each of them up. While
streams decode, the prompts' share of a step is therefore bound: to some tokens, and some more for each stream, whose
own token takes time too, and for each request that waits for its first token. A token far back in a long prompt counts
for more than one, by what its attention adds. So a step takes at most a few times as long as without prompts, whatever
the model and the machine. The bound is counted in tokens, not in measured time, so that a plan depends on its requests
alone.

Where as many requests wait for their first token as streams are under way, or more (a burst, a start), there is no
bound: a long step then shortens at least as many waits as it lengthens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nanoserve.sched.admission import SchedulerLimits
from nanoserve.sched.plan import PlanRow
from nanoserve.sched.request import Request

# While the arithmetic of so many parameters is done for a token, it attends to a byte of keys and values (some query
# heads share them). By bench.steps, ms a token in prompts of 512 and 1536: 0.238 and 0.286; on another CPU 0.53, 0.64.
PARAMETERS_PER_CONTEXT_BYTE = 2.5
MOST_COST = 4.0  # else the longest prompts would hardly get on


def prompt_context_cost(context_bytes: int, num_parameters: int) -> float:
    """What each token of context adds to a prompt's token, in tokens computed."""
    return context_bytes * PARAMETERS_PER_CONTEXT_BYTE / num_parameters if num_parameters else 0.0


@dataclass(slots=True)
class StepBudget:
    """Tokens that are left: `total`, and how many of them a request may have that computes more than its newest.

    Of those each counts as one and `context_cost` for each token of context before its row.
    """

    total: int
    prompts: int
    context_cost: float = 0.0
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
        return cls(total, min(share, total), limits.prompt_context_cost)

    def grant(self, wanted: int, start: int) -> int:
        """How many of the tokens that a request wants behind its first `start` it may have; 0 is none in this step."""
        if wanted == 1:
            return min(1, self.total)
        return min(wanted, max(1, int(self.prompts / self._cost(start)))) if self.prompts else 0

    def keep_for_probe(self, waiting: Sequence[Request]) -> None:
        """Where a probe of health waits, its token is not taken by those that run."""
        if waiting and waiting[0].is_probe:
            self.kept = 1
            self.total -= 1
            self.prompts = min(self.prompts, self.total)

    def for_start(self, request: Request, num_running: int, limits: SchedulerLimits) -> int:
        """With how many tokens at most a waiting request may begin; 0: not in this step. A probe has its own seat."""
        if request.is_probe and self.kept:
            self.total += self.kept
            self.kept = 0
            return 1
        return self.prompts if num_running < limits.max_num_running else 0

    def take(self, row: PlanRow) -> None:
        self.total -= row.num_tokens
        if _is_prompt(row):
            cost = self._cost(row.start)
            left = self.prompts - row.num_tokens * cost
            self.prompts = int(left) if left >= cost else 0  # no beginning of another prompt with a token or two
        self.prompts = min(self.prompts, self.total)

    def give_back(self, rows: Iterable[PlanRow]) -> None:
        """Of rows that are planned no more."""
        for row in rows:
            self.total += row.num_tokens
            if _is_prompt(row):
                self.prompts += int(row.num_tokens * self._cost(row.start))

    def _cost(self, start: int) -> float:
        return min(1.0 + self.context_cost * start, MOST_COST)


def _is_prompt(row: PlanRow) -> bool:
    return row.num_tokens > 1 or not row.samples
