"""`nanoserve bench NAME`: every benchmark can be reached, and its help says how it was called."""

from __future__ import annotations

import sys
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
