"""The scheduler's decisions, one at a time. Whole scenarios: test_scheduler_property.py."""

from __future__ import annotations

import pytest

from nanoserve.errors import RequestError
from nanoserve.ipc.messages import AbortCause, Failure, FinishReason
from nanoserve.sched.plan import StepPlan
from nanoserve.sched.scheduler import MAX_BYPASSES, Scheduler
from tests.factories import EOS, make_request, make_scheduler, run_step, run_to_end
from tests.fakes import FakeExecutor

GONE = AbortCause.CLIENT_GONE


def shape(plan: StepPlan) -> list[tuple[int, int, int, bool]]:
    return [(row.request_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def output_of(total_rows: list, request_id: int) -> list[int]:
    return [token_id for row in total_rows if row.request_id == request_id for token_id in row.token_ids]


def add(scheduler: Scheduler, request_id: int, **fields) -> None:
    assert scheduler.add(make_request(request_id, **fields), 0) is None


# ---- token budget -------------------------------------------------------------------------------------------


@pytest.mark.rule(32)
def test_a_long_prompt_is_computed_in_chunks_and_delays_streams_by_one_chunk() -> None:
    scheduler, executor = make_scheduler(max_num_batched_tokens=8), FakeExecutor(4)
    add(scheduler, 1, prompt=[5], max_tokens=10)
    run_step(scheduler, executor)
    add(scheduler, 2, prompt=range(2, 22), max_tokens=2)
    shapes = []
    for _ in range(4):
        run_step(scheduler, executor)
        shapes.append(shape(executor.plans[-1]))
    assert shapes == [
        [(1, 1, 1, True), (2, 0, 7, False)],
        [(1, 2, 1, True), (2, 7, 7, False)],
        [(1, 3, 1, True), (2, 14, 6, True)],
        [(1, 4, 1, True), (2, 20, 1, True)],
    ]


def test_never_more_running_requests_than_tokens_in_a_step() -> None:
    scheduler, executor = make_scheduler(max_num_batched_tokens=3, max_num_seqs=8), FakeExecutor(4)
    for request_id in range(1, 7):
        add(scheduler, request_id, prompt=[5], max_tokens=4)
    while scheduler.has_work:
        before = scheduler.num_running
        run_step(scheduler, executor)
        assert len(executor.plans[-1].rows) >= before, "a running request got no token"


def test_priority_lower_first_then_arrival() -> None:
    scheduler, executor = make_scheduler(policy="priority", max_num_seqs=1), FakeExecutor(4)
    for request_id, (priority, arrival) in enumerate([(5, 1), (0, 9), (0, 3), (2, 2)], start=1):
        add(scheduler, request_id, priority=priority, arrival_ns=arrival, max_tokens=1)
    assert scheduler.queue_position(3) == 0
    assert scheduler.queue_position(1) == 3
    assert [row.request_id for row in run_to_end(scheduler, executor).rows] == [3, 2, 4, 1]


def test_fcfs_passes_over_priority() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=1), FakeExecutor(4)
    add(scheduler, 1, priority=5, max_tokens=1)
    add(scheduler, 2, priority=0, max_tokens=1)
    assert [row.request_id for row in run_to_end(scheduler, executor).rows] == [1, 2]


# ---- ends ---------------------------------------------------------------------------------------------------


def test_max_tokens_zero_computes_the_prompt_and_ends() -> None:
    scheduler, executor = make_scheduler(max_num_batched_tokens=4), FakeExecutor(4)
    add(scheduler, 1, prompt=[5, 6, 7, 8, 9], max_tokens=0, prompt_logprobs=0)
    total = run_to_end(scheduler, executor)
    assert total.rows == []
    assert len(total.prompt_scores[0].scores) == 4
    assert not any(row.samples for plan in executor.plans for row in plan.rows)
    assert (total.finished[0].reason, total.finished[0].num_output_tokens) == (FinishReason.LENGTH, 0)


def test_the_context_ends_a_request() -> None:
    scheduler, executor = make_scheduler(max_model_len=8), FakeExecutor(4)
    add(scheduler, 1, prompt=range(2, 9), max_tokens=50)
    total = run_to_end(scheduler, executor)
    assert (total.finished[0].reason, total.finished[0].num_output_tokens) == (FinishReason.LENGTH, 1)


def test_eos_is_the_last_output_token_and_named() -> None:
    executor = FakeExecutor(4)
    probe = make_scheduler()
    add(probe, 1, max_tokens=6)
    tokens = output_of(run_to_end(probe, executor).rows, 1)
    scheduler = make_scheduler(eos=[tokens[3]])
    assert scheduler.add(make_request(2, max_tokens=6, ignore_eos=False), 0) is None
    total = run_to_end(scheduler, FakeExecutor(4))
    end = total.finished[0]
    assert output_of(total.rows, 2) == tokens[: tokens.index(tokens[3]) + 1]
    assert (end.reason, end.stop_token_id, end.is_eos) == (FinishReason.STOP, tokens[3], True)


def test_a_row_of_several_tokens_is_cut_at_the_stop() -> None:
    probe = make_scheduler()
    add(probe, 1, max_tokens=6)
    tokens = output_of(run_to_end(probe, FakeExecutor(4)).rows, 1)
    stop = next(token for token in tokens[1:] if token != tokens[0])
    scheduler = make_scheduler()
    add(scheduler, 1, max_tokens=6, stop_token_ids=(stop,), logprobs=0)
    total = run_to_end(scheduler, FakeExecutor(4, tokens_per_row=lambda position: 5))
    assert total.rows[0].token_ids == tokens[: tokens.index(stop) + 1]
    assert len(total.rows[0].scores or []) == len(total.rows[0].token_ids)
    assert total.finished[0].num_output_tokens == len(total.rows[0].token_ids)


@pytest.mark.rule(59)
def test_min_tokens_holds_eos_back_in_the_executor() -> None:
    scheduler = make_scheduler(eos=range(50))
    add(scheduler, 1, ignore_eos=False, min_tokens=3, max_tokens=9)
    plan = scheduler.schedule(1)
    assert plan.new_requests[0].suppressed_until_min_tokens == tuple(range(50))


# ---- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.rule(26)
def test_a_prompt_as_long_as_the_context_is_refused_with_the_limit_and_one_less_is_served() -> None:
    scheduler = make_scheduler(max_model_len=10)
    with pytest.raises(RequestError, match=r"maximum context length is 10 tokens.*contains 10 input tokens") as error:
        scheduler.add(make_request(1, range(10)), 0)
    assert (error.value.status, error.value.code) == (400, "context_length_exceeded")
    add(scheduler, 2, prompt=range(9), max_tokens=1)
    assert run_to_end(scheduler, FakeExecutor(4)).finished[0].num_output_tokens == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {100: 1.0}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {5: float("nan")}},
        {"stop_token_ids": (100,)},
        {"bad_words": ((5, 100),)},
        {"seed": 2**63},
        {"temperature": float("nan")},
        {"repetition_penalty": float("inf")},
    ],
)
def test_sampling_fields_that_would_break_a_step_are_refused(fields: dict[str, object]) -> None:
    scheduler = make_scheduler()  # 100 tokens
    with pytest.raises(RequestError) as error:
        scheduler.add(make_request(1, **fields), 0)
    assert error.value.status == 400
    assert not scheduler.has_work


@pytest.mark.rule(27)
def test_what_can_never_fit_into_the_pool_is_refused_and_the_rest_ends_at_the_pool() -> None:
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    with pytest.raises(RequestError, match=r"KV cache of this server limits the context length to 12 tokens") as error:
        scheduler.add(make_request(1, range(12)), 0)
    assert error.value.status == 400
    add(scheduler, 2, prompt=range(11), max_tokens=1)
    add(scheduler, 3, prompt=range(5), max_tokens=100)
    ends = {end.request_id: end for end in run_to_end(scheduler, FakeExecutor(4)).finished}
    assert ends[3].num_output_tokens == 7
    assert ends[3].reason is FinishReason.LENGTH


def test_a_full_queue_refuses_new_requests_but_not_resumed_ones() -> None:
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued=2)
    for request_id in (1, 2, 3):
        add(scheduler, request_id)
    with pytest.raises(RequestError) as error:
        scheduler.add(make_request(4), 0)
    assert (error.value.status, error.value.code) == (503, "queue_full")
    assert scheduler.add(make_request(5, output=[9]), 0) is None


@pytest.mark.rule(11)
@pytest.mark.parametrize("prompt", [[], [100], [-1], [5, 2**31 - 1]])
def test_bad_prompts_are_refused(prompt: list[int]) -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError) as error:
        scheduler.add(make_request(1, prompt), 0)
    assert (error.value.status, error.value.param) == (400, "prompt")
    assert not scheduler.has_work


# ---- memory -------------------------------------------------------------------------------------------------


def test_what_does_not_fit_lets_smaller_requests_pass_but_not_for_ever() -> None:
    scheduler, executor = make_scheduler(num_blocks=12, max_num_seqs=2, max_num_queued=500), FakeExecutor(4)
    add(scheduler, 1, prompt=[5], max_tokens=10**6)  # lives as long as the pool allows
    run_step(scheduler, executor)
    add(scheduler, 2, prompt=range(2, 45), max_tokens=1)  # 11 blocks: not beside request 1
    for request_id in range(3, 3 + 2 * MAX_BYPASSES):
        add(scheduler, request_id, prompt=[request_id % 90], max_tokens=1)
    passed = 0
    while scheduler.queue_position(2) == 0 and 1 in scheduler.live_ids():
        passed += len([row for row in run_step(scheduler, executor).rows if row.request_id > 2])
    assert passed >= 10, "the big request blocked the queue"
    run_to_end(scheduler, executor)


def test_a_passed_request_holds_the_queue_in_the_end() -> None:
    scheduler, executor = make_scheduler(num_blocks=64, max_num_seqs=2, max_num_queued=500), FakeExecutor(4)
    add(scheduler, 1, prompt=[5], max_tokens=200)
    run_step(scheduler, executor)
    add(scheduler, 2, prompt=[7] * 250, max_tokens=1)
    for request_id in range(3, 203):
        add(scheduler, request_id, prompt=[request_id % 90], max_tokens=1)
    order = [row.request_id for row in run_to_end(scheduler, executor).rows if row.request_id != 1]
    assert order.index(2) == MAX_BYPASSES


@pytest.mark.rule(34)
def test_the_last_arrived_gives_way_and_repeats_nothing() -> None:
    scheduler, executor = make_scheduler(num_blocks=6, prefix_cache=False), FakeExecutor(4)
    solo = make_scheduler(prefix_cache=False)
    expected = {}
    for request_id in (1, 2):
        add(solo, request_id, prompt=[request_id] * 6, max_tokens=14, logprobs=0)
        expected[request_id] = output_of(run_to_end(solo, FakeExecutor(4)).rows, request_id)
        add(scheduler, request_id, prompt=[request_id] * 6, max_tokens=14, logprobs=0)
    total = run_to_end(scheduler, executor)
    ends = {end.request_id: end for end in total.finished}
    assert ends[1].num_preemptions == 0
    assert ends[2].num_preemptions >= 1
    for request_id in (1, 2):
        rows = [row for row in total.rows if row.request_id == request_id]
        assert output_of(rows, request_id) == expected[request_id]
        assert [row.first_index for row in rows] == list(range(14))
        assert ends[request_id].num_output_tokens == 14


def test_the_lowest_priority_gives_way_also_when_its_row_is_planned_already() -> None:
    scheduler, executor = make_scheduler(num_blocks=4, policy="priority"), FakeExecutor(4)
    add(scheduler, 1, prompt=[3] * 6, priority=9, max_tokens=9)
    run_step(scheduler, executor)  # 1 began first, so it is planned first, though it is the last in order
    add(scheduler, 2, prompt=[4] * 2, priority=0, max_tokens=9)
    while not scheduler.counters.preemptions:
        run_step(scheduler, executor)
    plan = executor.plans[-1]
    assert shape(plan) == [(2, 4, 1, True)], "1 had taken the last block a step before, and was planned before 2"
    assert plan.dropped == [1]
    total = run_to_end(scheduler, executor)
    assert {end.request_id: end.num_preemptions for end in total.finished}[2] == 0


@pytest.mark.rule(34)
def test_prompt_scores_survive_a_preemption_between_chunks() -> None:
    scheduler, executor = make_scheduler(num_blocks=7, max_num_batched_tokens=3), FakeExecutor(4)
    add(scheduler, 1, prompt=[3], max_tokens=20)
    run_step(scheduler, executor)
    add(scheduler, 2, prompt=range(2, 22), max_tokens=2, prompt_logprobs=0)
    while not scheduler.counters.preemptions:
        assert run_step(scheduler, executor).prompt_scores == []
    total = run_to_end(scheduler, executor)
    alone = make_scheduler()
    add(alone, 2, prompt=range(2, 22), max_tokens=2, prompt_logprobs=0)
    assert total.prompt_scores == run_to_end(alone, FakeExecutor(4)).prompt_scores


def test_prompt_scores_that_are_out_are_not_computed_again() -> None:
    scheduler, executor = make_scheduler(num_blocks=6, prefix_cache=False), FakeExecutor(4)
    for request_id in (1, 2):
        add(scheduler, request_id, prompt=[request_id] * 6, max_tokens=14, prompt_logprobs=0)
    total = run_to_end(scheduler, executor)
    assert scheduler.counters.preemptions >= 1
    assert [prompt.request_id for prompt in total.prompt_scores] == [1, 2]
    again = [new for plan in executor.plans[1:] for new in plan.new_requests]
    assert [new.sampling.prompt_logprobs for new in again] == [None] * scheduler.counters.preemptions


# ---- prefix cache -------------------------------------------------------------------------------------------


def test_a_second_equal_prompt_computes_its_last_block_only() -> None:
    scheduler, executor = make_scheduler(), FakeExecutor(4)
    add(scheduler, 1, prompt=range(2, 14), max_tokens=2)
    run_to_end(scheduler, executor)
    add(scheduler, 2, prompt=range(2, 14), max_tokens=2)
    plan = scheduler.schedule(1)
    assert shape(plan) == [(2, 8, 4, True)], "the block of the last token is computed again"
    scheduler.update(plan, executor.execute(plan), 1)
    total = run_to_end(scheduler, executor)
    assert total.finished[0].num_cached_tokens == 8
    assert (scheduler.counters.prefix_query_tokens, scheduler.counters.prefix_hit_tokens) == (24, 8)


def test_a_second_turn_reuses_the_answer_too() -> None:
    scheduler, executor = make_scheduler(), FakeExecutor(4)
    add(scheduler, 1, prompt=range(2, 9), max_tokens=9)
    answer = output_of(run_to_end(scheduler, executor).rows, 1)
    add(scheduler, 2, prompt=[*range(2, 9), *answer, 50, 51], max_tokens=1)
    assert scheduler.schedule(1).rows[0].start == 12


@pytest.mark.rule(33)
def test_salts_do_not_share() -> None:
    scheduler, executor = make_scheduler(), FakeExecutor(4)
    add(scheduler, 1, prompt=range(2, 14), cache_salt="a")
    run_to_end(scheduler, executor)
    add(scheduler, 2, prompt=range(2, 14), cache_salt="b")
    add(scheduler, 3, prompt=range(2, 14), cache_salt="a")
    assert [row.start for row in scheduler.schedule(1).rows] == [0, 8]


def test_blocks_of_a_running_request_are_shared() -> None:
    scheduler, executor = make_scheduler(num_blocks=8), FakeExecutor(4)
    add(scheduler, 1, prompt=range(2, 18), max_tokens=8)
    run_step(scheduler, executor)
    add(scheduler, 2, prompt=range(2, 18), max_tokens=8)
    run_step(scheduler, executor)
    assert scheduler.tables.pool.num_used <= 8
    assert executor.plans[-1].rows[-1].start == 12
    run_to_end(scheduler, executor)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    scheduler, executor = make_scheduler(), FakeExecutor(4)
    for request_id in (1, 2, 3):
        add(scheduler, request_id, prompt=range(2, 16), max_tokens=3, seed=request_id)
    add(scheduler, 4, prompt=[50] * 6, max_tokens=3)
    run_step(scheduler, executor)
    run_step(scheduler, executor)
    assert shape(executor.plans[0]) == [(1, 0, 14, True), (4, 0, 6, True)]
    assert shape(executor.plans[1])[2:] == [(2, 12, 2, True), (3, 12, 2, True)]
    assert len(run_to_end(scheduler, executor).finished) == 4


def test_a_prompt_waits_for_the_last_chunk_of_an_equal_one() -> None:
    scheduler, executor = make_scheduler(max_num_batched_tokens=12), FakeExecutor(4)
    for request_id in (1, 2):
        add(scheduler, request_id, prompt=range(2, 19), max_tokens=3)
    for _ in range(3):
        run_step(scheduler, executor)
    assert [shape(plan) for plan in executor.plans] == [
        [(1, 0, 12, False)],
        [(1, 12, 5, True)],
        [(1, 17, 1, True), (2, 16, 1, True)],
    ]


def test_a_request_does_not_wait_a_step_for_a_small_part_of_its_prompt() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, prompt=range(2, 7))
    add(scheduler, 2, prompt=[*range(2, 6), *range(40, 60)])
    assert [row.request_id for row in scheduler.schedule(1).rows] == [1, 2]


def test_race_abort_of_the_request_whose_blocks_another_waits_for() -> None:
    scheduler, executor = make_scheduler(), FakeExecutor(4)
    for request_id in (1, 2):
        add(scheduler, request_id, prompt=range(2, 16), max_tokens=3)
    plan = scheduler.schedule(1)
    scheduler.abort([1], GONE, 2)
    scheduler.update(plan, executor.execute(plan), 3)
    total = run_to_end(scheduler, executor)
    assert [end.request_id for end in total.finished] == [2]
    assert shape(executor.plans[1]) == [(2, 0, 14, True)]


def test_hits_that_lie_in_the_free_list_are_not_counted_as_free_twice() -> None:
    scheduler, executor = make_scheduler(num_blocks=6), FakeExecutor(4)
    add(scheduler, 1, prompt=range(2, 14), max_tokens=1)
    run_to_end(scheduler, executor)
    add(scheduler, 2, prompt=[90] * 7, max_tokens=1)  # takes 2 of 6 blocks
    add(scheduler, 3, prompt=[*range(2, 14), *[91] * 10], max_tokens=1)  # 6 blocks, 3 of them cached and free
    assert len(run_to_end(scheduler, executor).finished) == 2


# ---- aborts and faults --------------------------------------------------------------------------------------


@pytest.mark.rule(29, 30)
def test_abort_in_every_state_frees_all_and_tells_once() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=2, max_num_batched_tokens=6), FakeExecutor(4)
    add(scheduler, 1, prompt=[5], max_tokens=50)  # decoding
    run_step(scheduler, executor)
    add(scheduler, 2, prompt=range(2, 32))  # in a prefill chunk
    add(scheduler, 3)  # waiting
    run_step(scheduler, executor)
    finished = scheduler.abort([1, 2, 3, 3, 77, 1], GONE, 5)
    assert [end.request_id for end in finished] == [1, 2, 3]
    assert {end.reason for end in finished} == {FinishReason.ABORT}
    assert scheduler.tables.pool.num_used == 0
    assert scheduler.abort([1, 2, 3], GONE, 6) == []
    assert run_to_end(scheduler, executor).rows == []
    assert executor.states == {}


@pytest.mark.rule(31)
def test_race_abort_while_the_step_runs_keeps_its_blocks_until_the_step_has_ended() -> None:
    scheduler, executor = make_scheduler(num_blocks=4), FakeExecutor(4)
    add(scheduler, 1, prompt=range(2, 14), max_tokens=5)
    plan = scheduler.schedule(1)
    assert len(scheduler.abort([1], GONE, 2)) == 1
    assert scheduler.tables.pool.num_used == 3, "the step still writes these blocks"
    scheduler.check_invariants()
    add(scheduler, 2, prompt=range(20, 32), max_tokens=1)
    output = scheduler.update(plan, executor.execute(plan), 3)
    assert (output.rows, output.finished) == ([], [])
    assert scheduler.tables.pool.num_used == 0
    assert len(run_to_end(scheduler, executor).finished) == 1


@pytest.mark.rule(30)
def test_race_abort_of_a_preempted_request() -> None:
    scheduler, executor = make_scheduler(num_blocks=6, prefix_cache=False), FakeExecutor(4)
    for request_id in (1, 2):
        add(scheduler, request_id, prompt=[request_id] * 6, max_tokens=14)
    while not scheduler.counters.preemptions:
        run_step(scheduler, executor)
    assert len(scheduler.abort([2], GONE, 1)) == 1
    scheduler.check_invariants()
    assert [end.request_id for end in run_to_end(scheduler, executor).finished] == [1]


@pytest.mark.rule(60)
def test_a_stop_string_counts_the_tokens_that_the_detokenizer_kept() -> None:
    scheduler, executor = make_scheduler(), FakeExecutor(4)
    add(scheduler, 1, max_tokens=50)
    for _ in range(5):
        run_step(scheduler, executor)
    (end,) = scheduler.abort([1], AbortCause.STOP_STRING, 9, num_kept=[3])
    assert (end.reason, end.num_output_tokens) == (FinishReason.STOP, 3)


@pytest.mark.rule(35)
def test_a_broken_row_ends_alone_and_its_blocks_are_not_found_again() -> None:
    scheduler, executor = make_scheduler(), FakeExecutor(4, broken_rows={1: 2})
    add(scheduler, 1, prompt=range(2, 14), max_tokens=6)
    add(scheduler, 2, prompt=[5, 6], max_tokens=6)
    total = run_to_end(scheduler, executor)
    ends = {end.request_id: end for end in total.finished}
    assert (ends[1].reason, ends[1].num_output_tokens) == (FinishReason.ERROR, 2)
    assert ends[1].failure == Failure(500, "NaN in the logits", None, "server_error", "row_failed")
    assert (ends[2].reason, ends[2].num_output_tokens) == (FinishReason.LENGTH, 6)
    add(scheduler, 3, prompt=range(2, 14))
    assert scheduler.schedule(1).rows[0].start == 0


def test_a_failed_step_ends_its_rows_and_spares_the_queue() -> None:
    scheduler, executor = make_scheduler(max_num_seqs=2), FakeExecutor(4)
    for request_id in (1, 2, 3):
        add(scheduler, request_id)
    plan = scheduler.schedule(1)
    scheduler.abort([2], GONE, 2)
    output = scheduler.fail_step(plan, Failure(500, "broken"), 3)
    assert [(end.request_id, end.reason) for end in output.finished] == [(1, FinishReason.ERROR)]
    scheduler.check_invariants()
    assert [end.request_id for end in run_to_end(scheduler, executor).finished] == [3]


# ---- resumed requests ---------------------------------------------------------------------------------------


def test_a_resumed_request_goes_on_where_it_was() -> None:
    probe = make_scheduler()
    add(probe, 1, max_tokens=8, seed=7)
    tokens = output_of(run_to_end(probe, FakeExecutor(4)).rows, 1)
    scheduler, executor = make_scheduler(), FakeExecutor(4)
    add(scheduler, 1, output=tokens[:3], max_tokens=8, seed=7)
    total = run_to_end(scheduler, executor)
    assert total.rows[0].first_index == 3
    assert output_of(total.rows, 1) == tokens[3:]
    assert total.finished[0].num_output_tokens == 8
    assert shape(executor.plans[0]) == [(1, 0, 6, True)]


def test_a_resumed_request_does_not_tell_its_prompt_scores_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, output=[9], max_tokens=3, prompt_logprobs=0)
    assert run_to_end(scheduler, FakeExecutor(4)).prompt_scores == []


@pytest.mark.parametrize(
    ("output", "reason"),
    [([9, EOS], FinishReason.STOP), ([9] * 8, FinishReason.LENGTH), ([9] * 253, FinishReason.LENGTH)],
)
def test_a_resumed_request_that_was_over_ends_at_once(output: list[int], reason: FinishReason) -> None:
    scheduler = make_scheduler()
    end = scheduler.add(make_request(1, output=output, max_tokens=8, ignore_eos=False), 0)
    assert end is not None
    assert (end.reason, end.num_output_tokens) == (reason, len(output))
    assert not scheduler.has_work
