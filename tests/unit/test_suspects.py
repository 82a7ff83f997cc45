"""Who is blamed for a crash, who is tried alone, who is refused: over several lives of an engine, without processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from nanoserve.engine.suspects import StepRecord, SuspectInbox, Suspects
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import AbortCause, AbortRequest, AddRequest, EngineInbox, SamplingParams


def add(request_id: int, prompt: int | None = None) -> AddRequest:
    """With a prompt of its own unless one is given."""
    return AddRequest(request_id, pack_ids([request_id if prompt is None else prompt]), SamplingParams(), b"")


class Engine:
    """Lives of a pretend engine: every request that is let in is in every step until it ends."""

    def __init__(self, directory: Path, poison: set[int], prompts: dict[int, int] | None = None) -> None:
        self._directory = directory
        self._prompts = prompts or {}
        self._poison = poison
        self.refused: list[int] = []
        self.crashes = 0
        self.running: list[int] = []

    def live(self, request_ids: Sequence[int], *, steps: int = 50) -> bool:
        """One life with these requests handed in; False when it ended in a crash."""
        self.running = []
        record = StepRecord(self._directory / "step")
        suspects = Suspects(record, self._directory / "strikes")
        waiting: list[EngineInbox] = [add(request_id, self._prompts.get(request_id)) for request_id in request_ids]
        try:
            for _ in range(steps):
                for message in suspects.order(waiting):
                    assert isinstance(message, AddRequest)
                    if suspects.refusal(message) is None:
                        self.running.append(message.request_id)
                    else:
                        self.refused.append(message.request_id)
                waiting = []
                if self.running:
                    suspects.step_begins(list(self.running))
                    if self._poison & set(self.running):
                        self.crashes += 1
                        return False
                    suspects.step_ended(list(self.running))
            return True
        finally:
            record.close()


@pytest.mark.parametrize("poison", [{3}, {1}, {8}, {2, 5}])
def test_only_the_poisoned_requests_end(tmp_path: Path, poison: set[int]) -> None:
    engine = Engine(tmp_path, poison)
    left = list(range(1, 9))
    while not engine.live(left):
        assert engine.crashes < 10
        left = [request_id for request_id in left if request_id not in engine.refused]
    assert set(engine.refused) == poison
    assert sorted(engine.running) == [request_id for request_id in range(1, 9) if request_id not in poison]
    assert engine.crashes <= 1 + len(poison)


def test_the_choices_of_one_poisoned_request_cost_two_crashes_together(tmp_path: Path) -> None:
    """The same prompt eight times: tried one by one they would use up the restarts of the whole server."""
    poison = set(range(3, 11))
    engine = Engine(tmp_path, poison, prompts=dict.fromkeys(poison, 7))
    left = list(range(1, 13))
    while not engine.live(left, steps=20):
        left = [request_id for request_id in left if request_id not in engine.refused]
    assert engine.crashes == 2
    assert set(engine.refused) == poison and sorted(engine.running) == [1, 2, 11, 12]


def test_a_trial_that_is_refused_holds_up_nobody(tmp_path: Path) -> None:
    """Nor is an engine that has nothing else to do asleep while others wait for their trial."""
    engine = Engine(tmp_path, {1})
    engine.live([1, 2, 3])
    engine.live([1, 2, 3])
    record = StepRecord(tmp_path / "step")
    suspects = Suspects(record, tmp_path / "strikes")
    (refused, tried) = suspects.order([add(1), add(2, 1), add(3)])
    assert suspects.refusal(refused) is not None  # type: ignore[arg-type]
    assert suspects.refusal(tried) is not None  # type: ignore[arg-type]
    assert suspects.order([]) == [add(3)]

    class Inbox:
        waited_ms = -1

        def wait(self, timeout_ms: int) -> bool:
            self.waited_ms = timeout_ms
            return False

    inbox = Inbox()
    held = Suspects(record, tmp_path / "strikes")
    held.order([add(2), add(3)])
    SuspectInbox(inbox, held).wait(1000)  # type: ignore[arg-type]
    assert inbox.waited_ms == 10
    record.close()


def test_without_a_crash_nothing_is_held_back(tmp_path: Path) -> None:
    engine = Engine(tmp_path, set())
    assert engine.live(range(1, 65), steps=1)
    assert len(engine.running) == 64


def test_newcomers_are_blamed_before_those_who_have_lived_through_a_step(tmp_path: Path) -> None:
    record = StepRecord(tmp_path / "step")
    suspects = Suspects(record, tmp_path / "strikes")
    suspects.step_begins([1, 2])
    assert record.read() == [1, 2]
    suspects.step_ended([1, 2])
    suspects.step_begins([1, 2, 3])
    assert record.read() == [3]
    suspects.step_ended([1, 2, 3])
    suspects.step_begins([1, 2, 3])
    assert record.read() == [1, 2, 3]
    record.close()


def test_a_kill_from_outside_leaves_no_strike(tmp_path: Path) -> None:
    engine = Engine(tmp_path, {1})
    engine.live([1, 2])
    (tmp_path / "step").unlink()  # what the supervisor does then
    record = StepRecord(tmp_path / "step")
    suspects = Suspects(record, tmp_path / "strikes")
    assert suspects.order([add(1), add(2)]) == [add(1), add(2)]
    record.close()


def test_a_held_request_that_is_aborted_is_let_in_to_be_ended(tmp_path: Path) -> None:
    Engine(tmp_path, {1}).live([1, 2, 3])
    record = StepRecord(tmp_path / "step")
    suspects = Suspects(record, tmp_path / "strikes")
    assert suspects.order([add(1), add(2), add(3)]) == [add(1)]
    abort = AbortRequest([3], AbortCause.CLIENT_GONE)
    assert suspects.order([abort]) == [add(3), abort]
    suspects.step_ended([1])
    assert suspects.order([]) == [add(2)]
    record.close()


def test_a_trial_that_never_comes_does_not_block_for_ever(tmp_path: Path) -> None:
    Engine(tmp_path, {1}).live([1, 2])
    record = StepRecord(tmp_path / "step")
    suspects = Suspects(record, tmp_path / "strikes")
    assert suspects.order([add(1), add(2)]) == [add(1)]
    later = [message for _ in range(200) for message in suspects.order([])]
    assert later == [add(2)]
    record.close()


@pytest.mark.parametrize("junk", [b"", b"\xff" * 40, b"\x05\0\0\0\x91"])
def test_a_broken_file_is_no_file(tmp_path: Path, junk: bytes) -> None:
    (tmp_path / "step").write_bytes(junk)
    (tmp_path / "strikes").write_bytes(junk)
    record = StepRecord(tmp_path / "step")
    assert Suspects(record, tmp_path / "strikes").order([add(1), add(2)]) == [add(1), add(2)]
    record.close()
