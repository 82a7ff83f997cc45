"""The trace of a profile: whose steps, which stages, and that nothing is measured while none runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoserve.engine.core import EngineCore
from nanoserve.engine.profile import StepProfiler, shape_of
from nanoserve.ipc.messages import StartProfile, StopProfile, TokenBatch
from nanoserve.sched.plan import PlanRow, StepPlan, StepResult, StepTimes
from tests.factories import make_add_request, make_clock, make_core, make_limits
from tests.fakes import FakeExecutor


class Timed(FakeExecutor):
    """Steps that say how long their stages took."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        result.times = StepTimes(1.1e-9, 2.1e-9, 3.1e-9)
        return result


class Engine:
    """The loop of `process.serve`, in memory."""

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        limits = make_limits()
        self.executor = Timed(limits.block_size, limits.vocab_size)
        looks = make_clock()
        self.profiler = StepProfiler(self.executor, clock or (lambda: 10 * looks()))  # 10 ns from look to look
        self.core: EngineCore = make_core(self.profiler)
        self.batches: list[TokenBatch] = []

    def send(self, batch: TokenBatch | None) -> None:
        if batch is not None:
            self.batches.append(batch)

    def step(self) -> None:
        self.profiler.follow(self.core.counters)
        if self.core.counters.profile_steps_left:
            self.profiler.step(self.core, self.send)
        else:
            self.send(self.core.step())

    def events(self, file: Path) -> list[dict[str, Any]]:
        self.profiler.close()
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
        return events


def test_the_trace_has_the_stages_of_exactly_the_steps_that_were_asked_for(tmp_path: Path) -> None:
    engine, file = Engine(), tmp_path / "profile.json"
    engine.core.handle(make_add_request(1, range(5, 12), max_tokens=9))
    engine.step()
    engine.core.handle(make_add_request(2, range(5, 9), max_tokens=9))
    engine.core.handle(StartProfile(7, 3, str(file)))
    for _ in range(5):
        engine.step()
    assert len(engine.batches) == 6  # a step of a profile is a step like any other
    events = engine.events(file)
    steps = [event for event in events if event["name"] == "step"]
    assert [step["args"]["step"] for step in steps] == [2, 3, 4]
    first = steps[0]["args"]
    assert (first["rows"], first["decode_rows"], first["prompt_tokens"], first["new_requests"]) == (2, 1, 4, 1)
    assert [step["args"]["decode_rows"] for step in steps[1:]] == [2, 2]
    spans = [(e["name"], round(e["ts"] * 1e3), round(e["dur"] * 1e3)) for e in events if e["ph"] == "X"]
    for number, (_, begins, lasts) in enumerate(span for span in spans if span[0] == "step"):
        assert lasts == 40
        assert spans[7 * number + 1 : 7 * number + 7] == [
            ("schedule", begins, 10), ("build", begins + 10, 1), ("forward", begins + 11, 2),
            ("sample", begins + 13, 3), ("update", begins + 20, 10), ("send", begins + 30, 10),
        ]  # fmt: skip
    assert [e["args"]["prompt_tokens"] for e in events if e["ph"] == "C"] == [4, 0, 0]


def test_nothing_is_measured_while_no_profile_runs(tmp_path: Path) -> None:
    calls: list[int] = []

    def clock() -> int:
        calls.append(1)
        return len(calls)

    engine = Engine(clock)
    engine.core.handle(make_add_request(1, max_tokens=9))
    for _ in range(3):
        engine.step()
    assert not calls
    engine.core.handle(StartProfile(7, 1, str(tmp_path / "profile.json")))
    engine.step()
    measured = len(calls)
    engine.step()
    assert measured == len(calls) == 5


def test_one_profile_at_a_time_and_the_stats_say_whose(tmp_path: Path) -> None:
    engine = Engine()
    engine.core.handle(make_add_request(1, max_tokens=9))

    def told(number: int, num_steps: int) -> tuple[int, int]:
        engine.core.handle(StartProfile(number, num_steps, str(tmp_path / f"{number}.json")))
        news = engine.core.take_news()
        assert news is not None and news.stats is not None
        return news.stats.profile, news.stats.profile_steps_left

    assert told(7, 2) == (7, 2)
    engine.step()
    assert told(8, 5) == (7, 1)
    engine.step()
    last = engine.batches[-1].stats
    assert last is not None and (last.profile, last.profile_steps_left) == (7, 0)
    assert told(9, 1) == (9, 1)
    engine.step()
    assert len(engine.events(tmp_path / "9.json")) == 1 + 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["7.json", "9.json"]


def test_a_profile_that_is_asked_for_in_the_last_step_of_another_has_its_own_steps(tmp_path: Path) -> None:
    engine = Engine()
    engine.core.handle(make_add_request(1, max_tokens=9))
    engine.core.handle(StartProfile(7, 1, str(tmp_path / "7.json")))
    engine.executor.during_step = lambda plan: engine.core.handle(StartProfile(8, 2, str(tmp_path / "8.json")))
    engine.step()
    engine.executor.during_step = lambda plan: None
    for _ in range(2):
        engine.step()
    numbers = [e["args"]["step"] for e in engine.events(tmp_path / "8.json") if e["name"] == "step"]
    assert numbers == [2, 3]
    assert [e["args"]["step"] for e in engine.events(tmp_path / "7.json") if e["name"] == "step"] == [1]


@pytest.mark.parametrize("in_step", [False, True])
def test_a_profile_that_is_stopped_has_the_steps_until_then(tmp_path: Path, in_step: bool) -> None:
    engine = Engine()
    engine.core.handle(make_add_request(1, max_tokens=9))
    engine.core.handle(StartProfile(7, 100, str(tmp_path / "7.json")))
    engine.step()
    if in_step:
        engine.executor.during_step = lambda plan: engine.core.handle(StopProfile())
        engine.step()
    else:
        engine.core.handle(StopProfile())
        told = engine.core.take_news()
        assert told is not None and told.stats is not None
        assert (told.stats.profile, told.stats.profile_steps_left) == (7, 0)
    engine.step()
    numbers = [e["args"]["step"] for e in engine.events(tmp_path / "7.json") if e["name"] == "step"]
    assert numbers == ([1, 2] if in_step else [1])


def test_a_profile_is_stopped_without_a_step_and_another_begins_at_once(tmp_path: Path) -> None:
    engine = Engine()
    engine.core.handle(StopProfile())  # of nothing
    engine.profiler.follow(engine.core.counters)
    for number in (7, 8):
        engine.core.handle(StartProfile(number, 100, str(tmp_path / f"{number}.json")))
        engine.profiler.follow(engine.core.counters)
        engine.core.handle(StopProfile())
    engine.core.handle(StartProfile(9, 1, str(tmp_path / "9.json")))
    engine.core.handle(make_add_request(1, max_tokens=9))
    engine.step()
    for number, num_steps in ((7, 0), (8, 0), (9, 1)):
        names = [event["name"] for event in engine.events(tmp_path / f"{number}.json")]
        assert names.count("step") == num_steps and names[0] == "process_name"


def test_a_step_that_fails_is_left_out_and_a_full_disk_costs_only_the_profile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, file = Engine(), tmp_path / "profile.json"
    engine.core.handle(make_add_request(1, max_tokens=9))
    engine.executor.broken_steps = {2}
    engine.core.handle(StartProfile(7, 3, str(file)))
    engine.step()
    engine.step()
    engine.core.handle(make_add_request(2, max_tokens=9))
    engine.step()
    assert [e["args"]["step"] for e in engine.events(file) if e["name"] == "step"] == [1, 3]
    engine.core.handle(StartProfile(8, 1, str(tmp_path / "gone" / "profile.json")))
    with caplog.at_level(logging.WARNING):
        engine.step()
        engine.profiler.close()
    assert "could not be written" in caplog.text
    engine.step()


def test_drafts_are_counted_beside_the_rows_they_belong_to() -> None:
    rows = [PlanRow(1, 9, 3, [], True, [4, 5]), PlanRow(2, 0, 8, [], False), PlanRow(3, 0, 5, [], True)]
    assert shape_of(StepPlan(4, [], rows, [])) == {
        "step": 4, "rows": 3, "decode_rows": 1, "prompt_tokens": 13, "draft_tokens": 2, "new_requests": 0,
        "longest_context": 12,
    }  # fmt: skip
