"""The engine without its process: what it says, when, and that it says each thing once."""

from __future__ import annotations

import pytest

from nanoserve.ipc.ids import RequestIdAllocator
from nanoserve.ipc.messages import AbortCause, AbortRequest, ApiGone, EngineInbox, FinishReason, Release, Resync
from nanoserve.sched.plan import StepPlan, StepResult, StepTimes
from tests.factories import make_add_request, make_core
from tests.fakes import FakeExecutor
from tests.unit.engine_ear import Ear, core_with, post, run


def test_admission_is_told_before_the_first_step() -> None:
    core, executor = core_with(make_add_request(1), make_add_request(2))
    news = core.take_news()
    assert news is not None
    assert executor.plans == []
    assert [(accepted.request_id, accepted.queue_position) for accepted in news.accepted] == [(1, 0), (2, 1)]
    assert [opened.request_id for opened in news.opened] == [1, 2]
    assert news.request_ids == []
    assert core.take_news() is None


def test_admission_during_a_step_is_told_with_that_step() -> None:
    core, executor = core_with(make_add_request(1))
    executor.during_step = lambda plan: core.handle(make_add_request(2)) if plan.step == 1 else None
    core.take_news()
    batch = core.step()
    assert batch is not None
    assert [accepted.request_id for accepted in batch.accepted] == [2]
    assert batch.request_ids == [1]


@pytest.mark.parametrize(
    ("message", "status"),
    [
        (make_add_request(1, []), 400),
        (make_add_request(1, [5] * 256), 400),
        (make_add_request(1, [100]), 400),
        (make_add_request(1, [5, -1]), 400),
    ],
)
def test_a_refused_request_opens_and_ends_without_rows(message: EngineInbox, status: int) -> None:
    core, executor = core_with(message)
    ear = Ear()
    run(core, ear)
    assert executor.plans == []
    assert ear.finished[1].reason is FinishReason.ERROR
    assert ear.finished[1].failure is not None
    assert ear.finished[1].failure.status == status


def test_ids_that_are_not_packed_are_a_refusal() -> None:
    broken = make_add_request(1)
    broken = type(broken)(1, b"abc", broken.sampling, broken.text_spec)
    core, _ = core_with(broken)
    ear = Ear()
    run(core, ear)
    assert ear.finished[1].reason is FinishReason.ERROR


def test_a_full_queue_refuses_with_503() -> None:
    core, _ = core_with(*(make_add_request(i) for i in (1, 2, 3)), max_num_seqs=1, max_num_queued=1)
    ear = Ear()
    run(core, ear)
    assert ear.finished[3].failure is not None
    assert ear.finished[3].failure.status == 503
    assert ear.finished[2].reason is FinishReason.LENGTH


@pytest.mark.rule(29)
def test_the_same_request_delivered_twice_runs_once() -> None:
    core, _ = core_with(make_add_request(1), make_add_request(1))
    ear = Ear()
    run(core, ear)
    core.handle(make_add_request(1))
    run(core, ear)
    assert len(ear.outputs[1]) == 8
    assert core.stats().dropped_messages == 2


# ---- ends ---------------------------------------------------------------------------------------------------


@pytest.mark.rule(73)
def test_gate_an_abort_leads_to_at_most_three_more_steps() -> None:
    """The hang-up after k tokens is noticed by the step that runs, at the latest."""
    core, executor = core_with(make_add_request(1, max_tokens=200), make_add_request(2, max_tokens=30))
    ear = Ear()
    for _ in range(5):
        ear.hear(core.take_news())
        ear.hear(core.step())
    before = len(executor.steps_with(1))
    assert len(ear.outputs[1]) == 5
    executor.during_step = lambda plan: post(core, AbortRequest([1], AbortCause.CLIENT_GONE))
    ear.hear(core.step())
    executor.during_step = lambda plan: None
    run(core, ear)
    assert len(executor.steps_with(1)) - before <= 3
    assert len(executor.steps_with(1)) - before == 1, "the inbox is drained before the result is taken in"
    assert ear.finished[1].reason is FinishReason.ABORT
    assert ear.finished[1].num_output_tokens == len(ear.outputs[1]) == 5
    assert len(ear.outputs[2]) == 30


@pytest.mark.rule(29)
def test_race_a_stop_string_and_the_last_token_in_one_step() -> None:
    core, executor = core_with(make_add_request(1, max_tokens=3))
    ear = Ear()
    stop = AbortRequest([1], AbortCause.STOP_STRING, [2])
    executor.during_step = lambda plan: post(core, stop) if plan.step == 3 else None
    run(core, ear)
    assert (ear.finished[1].reason, ear.finished[1].num_output_tokens) == (FinishReason.STOP, 2)
    core.handle(stop)
    run(core, ear)
    assert core.stats().stop_overrun_rows == 1  # the row of step 3, computed in vain; the late repeat is none


def test_a_stop_string_between_two_steps_costs_no_row() -> None:
    core, executor = core_with(make_add_request(1, max_tokens=30))
    ear = Ear()
    for _ in range(3):
        ear.hear(core.take_news())
        ear.hear(core.step())
    core.handle(AbortRequest([1], AbortCause.STOP_STRING, [2]))
    run(core, ear)
    assert len(executor.steps_with(1)) == 3
    assert core.stats().stop_overrun_rows == 0


@pytest.mark.rule(29, 30)
def test_unknown_ids_are_counted_and_nothing_else() -> None:
    core, _ = core_with(AbortRequest([7, 8], AbortCause.CLIENT_GONE), Release([9]), Resync([5]))
    assert core.take_news() is None
    assert core.stats().dropped_messages == 3
    assert not core.has_work


@pytest.mark.rule(35)
def test_a_broken_row_ends_alone() -> None:
    core, _ = core_with(make_add_request(1), make_add_request(2), executor=FakeExecutor(4, broken_rows={1: 3}))
    ear = Ear()
    run(core, ear)
    assert (ear.finished[1].reason, len(ear.outputs[1])) == (FinishReason.ERROR, 3)
    assert (ear.finished[2].reason, len(ear.outputs[2])) == (FinishReason.LENGTH, 8)


@pytest.mark.rule(35)
def test_a_step_that_fails_once_ends_its_requests_and_the_engine_goes_on() -> None:
    core, executor = core_with(make_add_request(1), executor=FakeExecutor(4, broken_steps={3}))
    ear = Ear()
    core.handle(make_add_request(2))
    executor.during_step = lambda plan: post(core, make_add_request(3)) if plan.step == 2 else None
    run(core, ear)
    assert [ear.finished[i].reason for i in (1, 2)] == [FinishReason.ERROR, FinishReason.ERROR]
    assert ear.finished[1].failure is not None
    assert ear.finished[1].failure.status == 500
    core.handle(make_add_request(4))
    run(core, ear)
    assert ear.finished[4].reason is FinishReason.LENGTH
    assert core.scheduler.tables.pool.num_used == 0


@pytest.mark.rule(35)
def test_two_failed_steps_in_a_row_end_the_process() -> None:
    core, _ = core_with(make_add_request(1), executor=FakeExecutor(4, broken_steps={2, 3}))
    core.step()
    core.step()
    core.handle(make_add_request(2))
    with pytest.raises(RuntimeError, match="the step broke"):
        core.step()


def test_failed_steps_with_a_good_one_between_do_not_end_the_process() -> None:
    core, _ = core_with(make_add_request(1), executor=FakeExecutor(4, broken_steps={2, 4}))
    for request_id in (2, 3):
        core.step()
        core.step()
        core.handle(make_add_request(request_id))
    run(core, ear := Ear())
    assert ear.finished[3].reason is FinishReason.LENGTH


def test_shut_down_ends_all() -> None:
    core, executor = core_with(make_add_request(1), make_add_request(2))
    core.step()
    batch = core.shut_down()
    assert batch is not None
    assert {(end.request_id, end.reason) for end in batch.finished} == {
        (1, FinishReason.ABORT),
        (2, FinishReason.ABORT),
    }
    assert executor.closed


# ---- what is kept for a detokenizer that forgets ------------------------------------------------------------


def test_stats_and_heartbeat() -> None:
    core, _ = core_with(make_add_request(1, range(2, 10), max_tokens=4), make_add_request(2, max_tokens=2))
    batch = core.step()
    assert batch is not None
    assert batch.stats is not None
    assert (batch.stats.num_running, batch.stats.steps, batch.stats.blocks_total) == (2, 1, 64)
    assert batch.stats.blocks_used == 3
    while core.has_work:
        core.step()
    beat = core.heartbeat()
    assert beat.request_ids == []
    stats = beat.stats
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.num_retained) == (0, 0, 0, 2)
    assert (stats.prompt_tokens, stats.generation_tokens) == (11, 6)
    assert stats.step_seconds > 0


def test_stats_tell_where_the_time_of_a_step_goes() -> None:
    class TimedExecutor(FakeExecutor):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            result.times = StepTimes(build_seconds=1.0, forward_seconds=2.0, sample_seconds=4.0)
            return result

    core = make_core(TimedExecutor(4))  # its clock advances a nanosecond a look
    core.handle(make_add_request(1, max_tokens=3))
    for _ in range(3):
        core.step()
    stats = core.stats()
    assert stats.steps == 3
    assert (stats.build_seconds, stats.forward_seconds, stats.sample_seconds) == (3.0, 6.0, 12.0)
    assert 0 < stats.schedule_seconds < stats.step_seconds


def test_an_idle_engine_that_still_holds_blocks_says_so_loudly() -> None:
    core, _ = core_with()
    core.scheduler.tables.pool.allocate(1)
    with pytest.raises(AssertionError, match="held by nobody"):
        core.heartbeat()


def test_the_executor_forgets_too() -> None:
    core, executor = core_with(make_add_request(1), make_add_request(2))
    run(core, Ear())
    assert executor.states == {}
    assert executor.plans[-1] == StepPlan(executor.plans[-1].step, [], [], [1, 2])


# ---- a dead api process -------------------------------------------------------------------------------------


def test_the_requests_of_a_dead_api_process_end_before_the_next_step_and_are_forgotten() -> None:
    first, second, other = (RequestIdAllocator(index, life) for index, life in ((0, 1), (0, 2), (1, 1)))
    dead, alive, neighbour = first.next(), second.next(), other.next()
    core, executor = core_with(*(make_add_request(request_id, max_tokens=30) for request_id in (dead, neighbour)))
    ear = Ear()
    ear.hear(core.take_news())
    ear.hear(core.step())
    core.handle(ApiGone(0, 1))
    late = first.next()
    core.handle(make_add_request(late))  # was on the way when its process died
    core.handle(make_add_request(alive))
    ear.hear(core.take_news())
    assert ear.finished[dead].reason == FinishReason.ABORT
    assert late not in ear.outputs and alive in ear.outputs
    ear.hear(core.step())
    assert {row.request_id for row in executor.plans[-1].rows} == {alive, neighbour}
    run(core, ear)
    assert dead not in core.ledger
    assert core.counters.dropped_messages == 1


def test_an_interrupted_step_leaves_books_that_can_be_closed() -> None:
    """As Ctrl-C in `nanoserve.LLM.generate`: its requests end, and the next ones are served."""
    executor = FakeExecutor(4)
    core = make_core(executor)
    core.handle(make_add_request(1, max_tokens=4))

    def interrupt(plan: StepPlan) -> None:
        raise KeyboardInterrupt

    executor.during_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        core.step()
    executor.during_step = lambda plan: None
    batch = core.take_news()
    assert batch is not None
    assert [end.reason for end in batch.finished] == [FinishReason.ERROR]
    core.handle(make_add_request(2, max_tokens=4))
    ends = []
    while core.has_work:
        batch = core.step()
        ends += batch.finished if batch else []
    assert [(end.request_id, end.reason) for end in ends] == [(2, FinishReason.LENGTH)]
    core.scheduler.check_idle()
