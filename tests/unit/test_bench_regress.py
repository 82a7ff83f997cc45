"""bench regress: ratios are compared with those of the same kind of machine only."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoserve.bench import regress

Run = Callable[..., int]
HERE = {"machine": regress.machine()}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the benchmark with `kept` in its file; each workload's ratio is 1, nothing is started."""
    monkeypatch.setattr(regress, "LAST", tmp_path / "last.json")
    monkeypatch.setattr(regress, "running", lambda server, log_dir: contextlib.nullcontext())
    found = {"out_tok_s": "100", "ratios": [1.0], "ratio": 1.0}
    monkeypatch.setattr(regress, "measure", lambda *_: found)

    def go(kept: dict[str, object] | None, *flags: str) -> int:
        if kept is not None:
            regress.LAST.write_text(json.dumps(kept))
        monkeypatch.setattr(sys, "argv", ["regress", "--workload", "W1", *flags])
        return regress.main()

    return go


def test_slower_than_the_same_kind_of_machine_was(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run({**HERE, "W1": 1.1}) == 0
    assert "| 1.1 | 0.91 |" in capsys.readouterr().out
    assert run({**HERE, "W1": 2.0}) == 1
    assert "slower than the last figures: W1" in capsys.readouterr().err


@pytest.mark.parametrize("other", [{"machine": "another CPU, 2 CPUs"}, {}])
def test_another_machine_is_not_compared_with(
    run: Run, capsys: pytest.CaptureFixture[str], other: dict[str, object]
) -> None:
    assert run({**other, "W1": 2.0}) == 0
    shown = capsys.readouterr()
    assert "| W1 | 100 |" in shown.out and "| - | - |" in shown.out
    assert "another kind of machine" in shown.err and "--save" in shown.err


def test_saving_keeps_what_was_not_run_of_this_machine_only(run: Run) -> None:
    assert run({**HERE, "W1": 2.0, "W2": 3.0}, "--save") == 0
    assert json.loads(regress.LAST.read_text()) == {**HERE, "W1": 1.0, "W2": 3.0}
    assert run({"machine": "another", "W1": 2.0, "W2": 3.0}, "--save") == 0
    assert json.loads(regress.LAST.read_text()) == {**HERE, "W1": 1.0}


def test_without_a_file(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(None) == 0
    assert not capsys.readouterr().err


def test_the_committed_file_names_its_machine() -> None:
    kept = json.loads((Path(__file__).resolve().parents[2] / "docs/bench-last.json").read_text())
    assert kept["machine"] and all(kept[name] > 0 for name in regress.WORKLOADS)
