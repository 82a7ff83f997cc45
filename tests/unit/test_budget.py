"""The prompts' share of a step: what a stream waits for its next token beside prompts, counted in tokens per step."""

from __future__ import annotations

import pytest

from nanoserve.config import SchedulerConfig
from nanoserve.engine.process import scheduler_limits
from nanoserve.ipc.messages import EngineFacts
from nanoserve.sched.budget import StepBudget
from nanoserve.sched.plan import PlanRow, StepPlan
from nanoserve.sched.scheduler import Scheduler
from tests.factories import make_request, make_scheduler, run_step
from tests.fakes import FakeExecutor


def add(scheduler: Scheduler, request_id: int, num_prompt_tokens: int, **fields) -> None:
    assert scheduler.add(make_request(request_id, [5] * num_prompt_tokens, **fields), 0) is None


def make_bounded(num_streams: int, **limits) -> tuple[Scheduler, FakeExecutor]:
    """A scheduler with so many streams that decode."""
    bounds = {"prompt_tokens_per_stream": 2, "base_prompt_tokens": 3, "prefix_cache": False, "num_blocks": 200}
    scheduler, executor = make_scheduler(**(bounds | limits)), FakeExecutor(4)
    for request_id in range(1, num_streams + 1):
        add(scheduler, request_id, 1, max_tokens=100)
    run_step(scheduler, executor)
    return scheduler, executor


def prompt_tokens(plan: StepPlan) -> int:
    return sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)


def steps_until_first_token(scheduler: Scheduler, executor: FakeExecutor, request_id: int) -> list[tuple[int, int]]:
    """(streams, prompt tokens) of each step up to the one that gives that request its first token."""
    seen = []
    while not seen or not any(row.request_id == request_id and row.samples for row in executor.plans[-1].rows):
        run_step(scheduler, executor)
        plan = executor.plans[-1]
        seen.append((sum(row.num_tokens == 1 for row in plan.rows), prompt_tokens(plan)))
        assert len(seen) < 100
    return seen


def test_a_prompt_beside_streams_is_computed_in_pieces_that_grow_with_their_number() -> None:
    for num_streams, piece in ((2, 9), (6, 17)):
        scheduler, executor = make_bounded(num_streams)
        add(scheduler, 99, 3 * piece)
        steps = steps_until_first_token(scheduler, executor, 99)
        assert steps == [(num_streams, piece)] * 3


def test_prompts_share_a_piece_and_every_stream_has_its_token_in_each_step() -> None:
    scheduler, executor = make_bounded(5)
    add(scheduler, 98, 12, max_tokens=100)
    add(scheduler, 99, 12, max_tokens=100)
    assert steps_until_first_token(scheduler, executor, 99) == [(5, 17), (6, 7)]


@pytest.mark.parametrize(("num_starting", "first", "second"), [(2, 13, 13), (3, 40, 15), (5, 40, 39)])
def test_a_burst_takes_whole_steps_while_it_is_as_large_as_the_streams(
    num_starting: int, first: int, second: int
) -> None:
    scheduler, executor = make_bounded(3, max_num_batched_tokens=43)
    for request_id in range(90, 90 + num_starting):
        add(scheduler, request_id, 40, max_tokens=100)
    steps = steps_until_first_token(scheduler, executor, 89 + num_starting)
    assert steps[:2] == [(3, first), (3 + (first == 40), second)]


def test_tokens_far_back_in_a_prompt_count_for_more() -> None:
    """By a 32nd for each token before them here, and never for more than four."""
    scheduler, executor = make_bounded(6, prompt_context_cost=1 / 32)
    add(scheduler, 99, 80)
    pieces = [piece for _, piece in steps_until_first_token(scheduler, executor, 99)]
    starts = [sum(pieces[:index]) for index in range(len(pieces))]
    costs = [min(1 + start / 32, 4) for start in starts]
    assert pieces[:-1] == [int(17 / cost) for cost in costs[:-1]] and sum(pieces) == 80
    assert pieces[:4] == [17, 11, 9, 7]
    scheduler, executor = make_bounded(2, prompt_context_cost=1.0)
    add(scheduler, 99, 21)
    assert [piece for _, piece in steps_until_first_token(scheduler, executor, 99)] == [9, *[2] * 6]


def test_what_is_left_over_by_a_dear_token_begins_no_other_prompt() -> None:
    scheduler, executor = make_bounded(6, prompt_context_cost=1.0)
    add(scheduler, 98, 40, max_tokens=100)
    add(scheduler, 99, 40, max_tokens=100)
    run_step(scheduler, executor)
    for _ in range(3):
        run_step(scheduler, executor)
        rows = {row.request_id: row.num_tokens for row in executor.plans[-1].rows}
        assert rows[98] == 4 and 99 not in rows  # 19 of its share, and 4 for each


def test_nobody_decodes_then_dear_tokens_are_computed_all_at_once() -> None:
    scheduler, executor = make_bounded(0, prompt_context_cost=1.0, max_num_batched_tokens=30)
    add(scheduler, 99, 60)
    assert steps_until_first_token(scheduler, executor, 99) == [(0, 30), (0, 30)]


def test_a_preempted_row_gives_back_what_it_took() -> None:
    budget = StepBudget(100, 40, context_cost=0.1)
    row = PlanRow(1, 10, 6, [], False)
    budget.take(row)
    assert (budget.total, budget.prompts) == (94, 28)
    budget.give_back([row])
    assert (budget.total, budget.prompts) == (100, 40)


def test_what_a_token_of_context_costs_a_prompt() -> None:
    facts = EngineFacts(100, 100, 10, 16, device="cpu", num_parameters=1000, context_bytes=4)
    assert scheduler_limits(SchedulerConfig(), facts).prompt_context_cost == 0.01
    assert scheduler_limits(SchedulerConfig(), EngineFacts(100, 100, 10, 16)).prompt_context_cost == 0.0


def test_who_waits_for_a_seat_is_no_reason_for_long_steps() -> None:
    scheduler, executor = make_bounded(3, max_num_seqs=4)
    for request_id in range(90, 99):
        add(scheduler, request_id, 20, max_tokens=100)
    assert steps_until_first_token(scheduler, executor, 90) == [(3, 11), (3, 9)]


def test_nobody_decodes_then_there_is_no_bound_and_none_without_the_option() -> None:
    scheduler, executor = make_bounded(0)
    add(scheduler, 99, 60)
    assert steps_until_first_token(scheduler, executor, 99) == [(0, 60)]
    scheduler, executor = make_bounded(5, prompt_tokens_per_stream=0)
    add(scheduler, 99, 59)
    assert steps_until_first_token(scheduler, executor, 99) == [(5, 59)]


@pytest.mark.parametrize(
    ("device", "asked", "bound"), [("cpu", 0, 2), ("cuda:0", 0, 0), ("sim", 0, 0), ("cuda:0", 9, 9)]
)
def test_the_bound_is_on_by_default_where_every_token_takes_time(device: str, asked: int, bound: int) -> None:
    facts = EngineFacts(100, 100, 10, 16, device=device)
    config = SchedulerConfig(prompt_tokens_per_stream=asked)
    assert scheduler_limits(config, facts).prompt_tokens_per_stream == bound
