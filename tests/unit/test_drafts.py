"""Which rows get drafts, what they may cost others, and what the scheduler makes of right and wrong ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nanoserve.config import SchedulerConfig
from nanoserve.engine.process import scheduler_limits
from nanoserve.ipc.columns import unpack_ids
from nanoserve.ipc.messages import EngineFacts, EngineStats
from nanoserve.runner.sim import SimExecutor
from nanoserve.sched.drafts import Drafting
from nanoserve.sched.ngram import NgramIndex
from nanoserve.sched.plan import StepPlan
from nanoserve.sched.scheduler import Scheduler
from tests.factories import make_add_request, make_core, make_request, make_scheduler, run_step, run_to_end
from tests.fakes import FakeExecutor

SURE = 1e9


class FixedIndex(NgramIndex):
    """Drafts a given text, whatever stood before."""

    def __init__(self, drafts: Sequence[int]) -> None:
        super().__init__(1)
        self._drafts = list(drafts)

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        return self._drafts[: max(0, count)]


class KnownIndex(NgramIndex):
    """Drafts the rest of a text that is known whole."""

    def __init__(self, text: Sequence[int]) -> None:
        super().__init__(1)
        self._text = list(text)

    def propose(self, token_ids: Sequence[int], count: int) -> list[int]:
        return self._text[len(token_ids) : len(token_ids) + max(0, count)]


def answer(**fields) -> list[int]:
    """What the fake says without drafts."""
    scheduler = make_scheduler()
    scheduler.add(make_request(1, **fields), 0)
    return [token for row in run_to_end(scheduler, FakeExecutor(4)).rows for token in row.token_ids]


def add(scheduler: Scheduler, request_id: int, index: NgramIndex, **fields) -> None:
    request = make_request(request_id, **fields)
    request.drafting = Drafting(index, num_right=SURE, num_tried=SURE)
    assert scheduler.add(request, 0) is None


def shape(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    return [(row.request_id, row.start, row.num_tokens, len(row.draft_token_ids)) for row in plan.rows]


def test_right_drafts_save_steps_and_none_goes_past_the_last_token() -> None:
    known = [5, 6, 7, *answer(max_tokens=12)]
    scheduler, executor = make_scheduler(num_draft_tokens=4), FakeExecutor(4)
    add(scheduler, 1, KnownIndex(known), max_tokens=12)
    output = run_to_end(scheduler, executor)
    assert [token for row in output.rows for token in row.token_ids] == known[3:]
    assert [shape(plan) for plan in executor.plans if plan.rows] == [
        [(1, 0, 3, 0)],
        [(1, 3, 5, 4)],
        [(1, 8, 5, 4)],
        [(1, 13, 1, 0)],  # one token is left: nothing to draft
    ]
    assert (scheduler.drafter.num_drafts, scheduler.drafter.num_right) == (8, 8)


def test_positions_of_wrong_drafts_are_computed_again_in_the_same_blocks() -> None:
    known = answer(max_tokens=6)
    scheduler, executor = make_scheduler(num_draft_tokens=4), FakeExecutor(4)
    wrong = (known[2] + 1) % 100
    add(scheduler, 1, FixedIndex([known[1], wrong, 1, 1]), max_tokens=6)
    run_step(scheduler, executor)
    output = run_step(scheduler, executor)
    assert output.rows[0].token_ids == known[1:3], "the right draft, and what was drawn in the wrong one's place"
    assert len(executor.plans[-1].rows[0].new_block_ids) == 1
    run_step(scheduler, executor)
    row = executor.plans[-1].rows[0]
    assert (row.start, row.new_block_ids) == (5, [])


def test_a_row_that_breaks_after_a_right_draft_tells_what_came_before() -> None:
    known = answer(max_tokens=8)
    scheduler = make_scheduler(num_draft_tokens=4)
    executor = FakeExecutor(4, broken_rows={1: 3})
    add(scheduler, 1, KnownIndex([5, 6, 7, *known]), max_tokens=8)
    output = run_to_end(scheduler, executor)
    assert [token for row in output.rows for token in row.token_ids] == known[:3]
    assert output.finished[0].failure is not None


def test_a_stop_inside_the_drafts_ends_the_answer_there() -> None:
    known = answer(max_tokens=8)
    scheduler, executor = make_scheduler(num_draft_tokens=6), FakeExecutor(4)
    add(scheduler, 1, KnownIndex([5, 6, 7, *known]), max_tokens=8, stop_token_ids=(known[3],), logprobs=0)
    output = run_to_end(scheduler, executor)
    assert [token for row in output.rows for token in row.token_ids] == known[:4]
    assert [len(row.scores or []) for row in output.rows] == [1, 3]
    assert output.finished[0].stop_token_id == known[3]


def test_drafts_take_no_token_from_prompts_or_streams() -> None:
    scheduler, executor = make_scheduler(num_draft_tokens=4, max_num_batched_tokens=8), FakeExecutor(4)
    add(scheduler, 1, FixedIndex([1] * 9), max_tokens=40)
    run_step(scheduler, executor)
    add(scheduler, 2, FixedIndex([1] * 9), prompt=range(2, 18), max_tokens=40)
    shapes = []
    for _ in range(4):
        run_step(scheduler, executor)
        shapes.append(shape(executor.plans[-1]))
    assert [[(row[0], row[2]) for row in rows] for rows in shapes] == [
        [(1, 1), (2, 7)],
        [(1, 1), (2, 7)],
        [(1, 5), (2, 2)],
        [(1, 5), (2, 3)],
    ]


def test_drafts_take_no_block_that_a_stream_may_need_and_preempt_nobody() -> None:
    scheduler, executor = make_scheduler(num_draft_tokens=8, num_blocks=5, max_model_len=20), FakeExecutor(4)
    add(scheduler, 1, FixedIndex([1] * 9), prompt=range(2, 6), max_tokens=12)
    add(scheduler, 2, FixedIndex([1] * 9), prompt=range(6, 10), max_tokens=12)
    run_step(scheduler, executor)
    while scheduler.num_running == 2 and not scheduler.counters.preemptions:
        free = scheduler.tables.pool.num_free
        plan = scheduler.schedule(1)
        needed = sum(row.start % 4 == 0 for row in plan.rows)
        taken = sum(len(row.new_block_ids) for row in plan.rows)
        assert taken == needed or free - taken >= 2
        scheduler.update(plan, executor.execute(plan), 1)
    assert scheduler.counters.preemptions == 1, "only for the streams' own tokens"


def num_drafts(scheduler: Scheduler, num_steps: int, executor: FakeExecutor) -> list[int]:
    """Drafts that each of the next steps computes."""
    counts = []
    for _ in range(num_steps):
        run_step(scheduler, executor)
        counts.append(sum(len(row.draft_token_ids) for row in executor.plans[-1].rows))
    return counts


def test_drafts_are_compared_before_any_is_computed() -> None:
    known = [5, 6, 7, *answer(max_tokens=40)]
    scheduler, request = make_scheduler(num_draft_tokens=4), make_request(1, max_tokens=40)
    request.drafting = Drafting(KnownIndex(known))
    scheduler.add(request, 0)
    counts = num_drafts(scheduler, 8, FakeExecutor(4))
    assert counts[:2] == [0, 0], "the prompt, and a step whose draft was a guess only"
    assert counts[2] > 0 and counts[6] == 4
    assert request.token_ids == known[: len(request.token_ids)]


def test_drafts_that_would_be_wrong_are_never_computed() -> None:
    scheduler, request = make_scheduler(num_draft_tokens=4), make_request(1, max_tokens=150)
    never = 10**6  # no token of the fake's
    request.drafting = Drafting(FixedIndex([never] * 4))
    scheduler.add(request, 0)
    assert sum(num_drafts(scheduler, 140, FakeExecutor(4))) == 0 and request.drafting.num_tried > 5


def test_drafts_that_become_wrong_stop_and_come_back_once_right() -> None:
    known = [5, 6, 7, *answer(max_tokens=200)]
    scheduler, request = make_scheduler(num_draft_tokens=4), make_request(1, max_tokens=200)
    index = KnownIndex(known)
    request.drafting = Drafting(index)
    scheduler.add(request, 0)
    executor = FakeExecutor(4)
    assert sum(num_drafts(scheduler, 8, executor)) > 0
    index._text = [10**6] * 300
    wrong = num_drafts(scheduler, 40, executor)
    assert sum(wrong) < 40 and sum(wrong[20:]) == 0
    index._text = known
    assert sum(num_drafts(scheduler, 12, executor)) > 0


@pytest.mark.parametrize(("num_streams", "drafted"), [(1, True), (3, True), (4, False), (9, False)])
def test_only_few_streams_get_drafts(num_streams: int, drafted: bool) -> None:
    """A step of many rows costs all of them more, and a right draft saves one row's share."""
    scheduler = make_scheduler(num_draft_tokens=4)
    for request_id in range(1, num_streams + 1):
        add(scheduler, request_id, FixedIndex([1] * 9), prompt=[request_id], max_tokens=20)
    assert (sum(num_drafts(scheduler, 3, FakeExecutor(4))) > 0) is drafted


@pytest.mark.parametrize(("cost", "drafted"), [(0.1, [4]), (0.01, []), (0.0, [])])
def test_with_a_long_context_drafts_are_worth_it_beside_many_streams(cost: float, drafted: list[int]) -> None:
    """Each right one saves the reading of a whole context; only those with a long one get them."""
    scheduler, executor = make_scheduler(num_draft_tokens=4, context_cost=cost), FakeExecutor(4)
    for request_id in range(1, 9):
        prompt = range(2, 42) if request_id == 4 else [request_id]
        add(scheduler, request_id, FixedIndex([1] * 9), prompt=prompt, max_tokens=20)
    run_step(scheduler, executor)
    assert [row.request_id for row in scheduler.schedule(1).rows if row.draft_token_ids] == drafted


def test_what_a_token_of_context_costs_comes_from_the_model() -> None:
    """SmolLM2-135M in bfloat16: 23,040 bytes; some 530 tokens of context are read in the time of one computed."""
    facts = EngineFacts(100, 100, 10, 16, num_parameters=134_515_008, context_bytes=23_040)
    assert 1 / scheduler_limits(SchedulerConfig(), facts).context_cost == pytest.approx(530, abs=1)
    assert scheduler_limits(SchedulerConfig(), EngineFacts(100, 100, 10, 16)).context_cost == 0


def test_a_prompt_beside_them_gets_no_drafts_for_many_streams() -> None:
    """It makes the step longer, so drafts cheaper, and whatever comes in a lump later."""
    scheduler, executor = make_scheduler(num_draft_tokens=4, max_num_batched_tokens=16), FakeExecutor(4)
    for request_id in range(1, 5):
        add(scheduler, request_id, FixedIndex([1] * 9), prompt=[request_id], max_tokens=20)
    run_step(scheduler, executor)
    add(scheduler, 5, FixedIndex([1] * 9), prompt=range(2, 10), max_tokens=20)
    assert sum(num_drafts(scheduler, 2, executor)) == 0


def test_indexes_are_made_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 streams that come to long contexts together would hold up one step by 30 ms."""
    monkeypatch.setattr("nanoserve.sched.drafts.MOST_INDEXED", 30)
    scheduler = make_scheduler(num_draft_tokens=4, max_num_batched_tokens=256, context_cost=1.0)
    executor = FakeExecutor(4)
    requests = [make_request(request_id, prompt=[request_id] * 12, max_tokens=8) for request_id in range(1, 5)]
    requests.append(make_request(5, prompt=range(6, 74), max_tokens=8))
    for request in requests:
        scheduler.add(request, 0)
    made = []
    for _ in range(7):
        run_step(scheduler, executor)
        made.append([request.request_id for request in requests if request.drafting is not None])
    begin = next(index for index, ids in enumerate(made) if ids)
    assert made[begin : begin + 4] == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]]


def test_where_no_draft_could_pay_no_index_is_made() -> None:
    scheduler = make_scheduler(num_draft_tokens=4)
    requests = [make_request(request_id, prompt=[5, 5, 5, 5], max_tokens=5) for request_id in range(1, 5)]
    for request in requests:
        scheduler.add(request, 0)
    run_to_end(scheduler, FakeExecutor(4))
    assert all(request.drafting is None for request in requests)


def test_without_speculation_no_index_is_kept() -> None:
    scheduler, executor = make_scheduler(), FakeExecutor(4)
    request = make_request(1, prompt=[5, 5, 5, 5], max_tokens=5)
    scheduler.add(request, 0)
    run_to_end(scheduler, executor)
    assert request.drafting is None
    assert all(not row.draft_token_ids for plan in executor.plans for row in plan.rows)


def sim_answers(output: str, num_draft_tokens: int) -> tuple[dict[int, list[int]], EngineStats]:
    """Three requests to the sim model through the engine core; min_tokens and a forcing bias among them."""
    sim = SimExecutor(50, output=output, step_seconds=0, token_seconds=0)
    core = make_core(sim, vocab_size=50, num_draft_tokens=num_draft_tokens, shortest_match=1)
    core.handle(make_add_request(1, [2, 3, 4, 5], max_tokens=30, logprobs=2))
    core.handle(make_add_request(2, [7, 8], max_tokens=30, min_tokens=9, stop_token_ids=(8,), seed=4))
    core.handle(make_add_request(3, [9, 9], max_tokens=60, logit_bias={30: 100.0}))
    told: dict[int, list[int]] = {1: [], 2: [], 3: []}
    while core.has_work:
        batch = core.step()
        if batch is None:  # a step that only drops state
            continue
        ids = iter(unpack_ids(batch.token_ids))
        for request_id, count in zip(batch.request_ids, batch.num_tokens, strict=True):
            told[request_id] += [next(ids) for _ in range(count)]
        for row in batch.logprobs:
            assert len(row.logprobs) == batch.num_tokens[row.row]
    return told, core.stats()


@pytest.mark.parametrize("output", ["echo", "random"])
def test_the_sim_model_says_the_same_and_the_stats_tell_of_drafts(output: str) -> None:
    plain, before = sim_answers(output, 0)
    drafted, stats = sim_answers(output, 4)
    assert drafted == plain
    assert (before.draft_tokens, before.accepted_draft_tokens) == (0, 0)
    assert stats.draft_tokens >= stats.accepted_draft_tokens > 0
    assert stats.steps < before.steps


@pytest.mark.parametrize(
    ("asked", "device", "batch_invariant", "drafts"),
    [
        (-1, "cpu", True, 4),
        (-1, "cpu", False, 0),
        (-1, "cuda:0", False, 0),
        (-1, "sim", True, 0),
        (0, "cpu", True, 0),
        (7, "cuda:0", False, 7),
    ],
)
def test_unasked_only_a_cpu_drafts_and_only_where_company_changes_nothing(
    asked: int, device: str, batch_invariant: bool, drafts: int
) -> None:
    facts = EngineFacts(100, 100, 10, 16, device=device, batch_invariant=batch_invariant)
    assert scheduler_limits(SchedulerConfig(speculative_num_tokens=asked), facts).num_draft_tokens == drafts
