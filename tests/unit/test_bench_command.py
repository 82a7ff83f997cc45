"""`nanoserve bench NAME`: every benchmark can be reached, and its help says how it was called."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import nanoserve
from nanoserve import __main__ as console

_PARTS = {"detok_vllm"}  # started by another benchmark, in an environment of its own


def test_every_benchmark_is_a_command() -> None:
    files = (Path(nanoserve.__file__).parent / "bench").glob("*.py")
    programs = {file.stem for file in files if "\ndef main(" in file.read_text(encoding="utf-8")}
    assert programs - _PARTS == {name.replace("-", "_") for name in console._BENCHMARKS}
    assert all(name in console._USAGE for name in console._BENCHMARKS)


def test_a_benchmark_is_told_under_which_name_it_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    module = SimpleNamespace(main=lambda: seen.append(list(sys.argv)))
    monkeypatch.setattr(console.importlib, "import_module", lambda name: module)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/nanoserve", "bench", "steps", "--help"])
    assert console.main() == 0
    assert seen == [["nanoserve bench steps", "--help"]]


@pytest.mark.parametrize("name", console._BENCHMARKS)
def test_every_usage_line_is_the_way_it_was_started(name: str) -> None:
    file = Path(nanoserve.__file__).parent / "bench" / f"{name.replace('-', '_')}.py"
    assert file.read_text(encoding="utf-8").count(f'prog=program("{name}")') == 1


def test_a_usage_line_is_a_command_that_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def usage(start: Callable[[], object]) -> str:
        with pytest.raises(SystemExit):
            start()
        return capsys.readouterr().out.partition(" [-h]")[0]

    monkeypatch.setattr(sys, "argv", ["/usr/bin/nanoserve", "bench", "chaos-peer", "--help"])
    assert usage(console.main) == "usage: nanoserve bench chaos-peer"
    monkeypatch.setattr(sys, "argv", ["-m", "--help"])
    module = "nanoserve.bench.chaos_peer"
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert usage(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True)) == f"usage: python -m {module}"
