"""Scenarios of requests that arrive, are aborted, are resumed, and the checks that nothing is lost or changed.

Used with the fake executor (unit tests) and with real models (integration tests).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from nanoserve.errors import RequestError
from nanoserve.ipc.messages import AbortCause, Finished, FinishReason
from nanoserve.sched.plan import Executor
from nanoserve.sched.request import StepOutput, TokenRow
from nanoserve.sched.scheduler import Scheduler
from tests.factories import EOS, make_limits, make_request, run_to_end


@dataclass
class Ask:
    """One request of a scenario and when things happen to it."""

    prompt: list[int]
    sampling: dict[str, Any]
    priority: int
    arrival_step: int
    abort_step: int | None
    abort_in_flight: bool
    salt: str
    resume_after: int


@dataclass
class Story:
    """All that was ever said about one request."""

    output: list[int] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    prompt_scores: list[Any] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)

    def take_row(self, row: TokenRow) -> None:
        assert not self.finished, "a row after the terminal record"
        assert row.first_index == len(self.output), "a gap or a repeat in the output"
        assert row.token_ids
        self.output += row.token_ids
        self.scores += row.scores or []


def solo(ask: Ask, limits: dict[str, Any], executor: Executor) -> tuple[Story, RequestError | None]:
    """The same request alone, on an idle engine with memory enough, without a prefix cache."""
    roomy = make_limits(
        block_size=limits["block_size"],
        vocab_size=limits["vocab_size"],
        max_model_len=make_limits(**limits).context_len,
        prefix_cache=False,
    )
    scheduler = Scheduler(roomy, (EOS,))
    story = Story()
    try:
        scheduler.add(make_request(1, ask.prompt, **ask.sampling), 0)
    except RequestError as error:
        return story, error
    tell({1: story}, run_to_end(scheduler, executor))
    return story, None


def tell(stories: dict[int, Story], output: StepOutput) -> None:
    for row in output.rows:
        stories[row.request_id].take_row(row)
    for prompt in output.prompt_scores:
        assert not stories[prompt.request_id].prompt_scores, "prompt scores twice"
        stories[prompt.request_id].prompt_scores = prompt.scores
    for finished in output.finished:
        stories[finished.request_id].finished.append(finished)


class Scenario:
    """Plays the asks against one scheduler and checks it after each step."""

    def __init__(self, asked: list[Ask], limits: dict[str, Any], executor: Executor, solo_executor: Executor) -> None:
        self.asks = dict(enumerate(asked, start=1))
        self.alone = {request_id: solo(ask, limits, solo_executor) for request_id, ask in self.asks.items()}
        self.scheduler = Scheduler(make_limits(**limits), (EOS,))
        self.executor = executor
        self.stories: dict[int, Story] = {}
        self.refused: dict[int, RequestError] = {}

    def play(self) -> None:
        step = 0
        while self.scheduler.has_work or any(ask.arrival_step >= step for ask in self.asks.values()):
            self._arrive(step)
            self._abort(step, in_flight=False)
            plan = self.scheduler.schedule(step)
            assert sum(row.num_tokens for row in plan.rows) <= self.scheduler.limits.max_num_batched_tokens
            assert len(plan.rows) <= self.scheduler.limits.max_num_seqs
            assert plan.rows or not self.scheduler.num_running + self.scheduler.num_waiting, "nobody gets on"
            self.scheduler.check_invariants()
            result = self.executor.execute(plan)
            self._abort(step, in_flight=True)
            self.scheduler.check_invariants()
            tell(self.stories, self.scheduler.update(plan, result, step))
            self.scheduler.check_invariants()
            step += 1
            assert step < 3000, "no end"

    def _arrive(self, step: int) -> None:
        for request_id, ask in self.asks.items():
            if ask.arrival_step != step:
                continue
            earlier = self.alone[request_id][0].output[: ask.resume_after]
            request = make_request(
                request_id,
                ask.prompt,
                output=earlier,
                priority=ask.priority,
                cache_salt=ask.salt,
                arrival_ns=step,
                **ask.sampling,
            )
            self.stories[request_id] = Story(list(earlier), list(self.alone[request_id][0].scores[: len(earlier)]))
            try:
                finished = self.scheduler.add(request, step)
            except RequestError as error:
                self.refused[request_id] = error
            else:
                tell(self.stories, StepOutput(finished=[finished] if finished else []))

    def _abort(self, step: int, *, in_flight: bool) -> None:
        ids = [i for i, ask in self.asks.items() if ask.abort_step == step and ask.abort_in_flight == in_flight]
        finished = self.scheduler.abort(ids, AbortCause.CLIENT_GONE, step)
        assert self.scheduler.abort(ids, AbortCause.CLIENT_GONE, step) == []
        tell(self.stories, StepOutput(finished=finished))

    def check(self) -> None:
        assert self.scheduler.tables.pool.num_used == 0
        for request_id, ask in self.asks.items():
            story, (alone, refusal) = self.stories[request_id], self.alone[request_id]
            if request_id in self.refused:
                error = self.refused[request_id]
                assert error.status == 503 or (refusal is not None and refusal.status == error.status)
                assert not story.finished
                continue
            assert refusal is None
            assert len(story.finished) == 1, f"{len(story.finished)} terminal records"
            end = story.finished[0]
            assert end.num_output_tokens == len(story.output)
            assert end.num_prompt_tokens == len(ask.prompt)
            if end.reason is FinishReason.ABORT:
                assert ask.abort_step is not None
                assert story.output == alone.output[: len(story.output)]
                continue
            solo_end = alone.finished[0]
            assert story.output == alone.output
            assert story.scores == alone.scores
            assert (end.reason, end.stop_token_id, end.is_eos) == (
                solo_end.reason,
                solo_end.stop_token_id,
                solo_end.is_eos,
            )
            resumed = ask.resume_after and alone.output
            assert story.prompt_scores == ([] if resumed else alone.prompt_scores)


def storm(random: Random, *, vocab_size: int, block_size: int, scale: int = 1) -> tuple[list[Ask], dict[str, Any]]:
    """A scenario that hurts: many equal prompts, little memory. Drawn evenly, where hypothesis prefers the simple."""
    context_len = random.randint(16, 40) * scale
    limits = {
        "max_num_seqs": random.randint(2, 6),
        "max_num_batched_tokens": random.randint(3, 24) * scale,
        "prompt_tokens_per_stream": random.choice([0, 1, 3]),
        "base_prompt_tokens": random.randint(1, 6) * scale,
        "prompt_context_cost": random.choice([0.0, 0.01, 1.0]),
        "max_model_len": context_len,
        "num_blocks": -(-context_len // block_size) + random.randint(0, 40 * scale // block_size),
        "block_size": block_size,
        "vocab_size": vocab_size,
        "policy": random.choice(["fcfs", "priority"]),
        "prefix_cache": random.random() < 0.8,
    }
    shared = [random.randrange(2, vocab_size) for _ in range(context_len // 2)]
    asked = []
    for _ in range(random.randint(4, 14)):
        prompt = shared[: random.randint(1, len(shared))] + shared[: random.choice([0, 0, 3])]
        sampling = {
            "max_tokens": random.choice([0, 1, 6, 15, 30 * scale, 30 * scale]),
            "min_tokens": random.choice([0, 0, 6]),
            "seed": random.randint(0, 1),
            "temperature": random.choice([0.0, 1.0]),
            "ignore_eos": random.random() < 0.8,
            "stop_token_ids": random.choice([(), (), (3,)]),
            "logprobs": random.choice([None, 0]),
            "prompt_logprobs": random.choice([None, None, 0]),
        }
        abort_step = random.choice([None, None, None, random.randint(0, 30)])
        asked.append(
            Ask(
                prompt,
                sampling,
                priority=random.randint(0, 2),
                arrival_step=random.randint(0, 15),
                abort_step=abort_step,
                abort_in_flight=random.random() < 0.5,
                salt=random.choice(["", "", "", "s"]),
                resume_after=random.choice([0, 0, 0, 2]),
            )
        )
    return asked, limits
