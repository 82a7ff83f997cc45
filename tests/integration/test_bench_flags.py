"""Benchmarks of the engine: a value that cannot be measured is said in one line, before a model is loaded."""

from __future__ import annotations

import importlib
import sys

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "flags", "words"),
    [
        ("steps", ["--decode", "4"], "'4' is not ROWSxCONTEXT, such as 8x256"),
        ("steps", ["--decode", "4x0"], "'4x0' is not ROWSxCONTEXT"),
        ("steps", ["--decode", "1x20000"], "contexts are 1 to 8192 tokens of this model, not 20000"),
        ("steps", ["--decode", "1x8", "--prefill", "8193"], "not 8193"),
        ("steps", ["--decode", "--prefill"], "not 0"),
        ("steps", ["--prefill", "-3"], "'-3' is no whole number of at least 1"),
        ("accuracy", ["--tokens", "1"], "a text of one token has no next one"),
        ("accuracy", ["--prompts", "x"], "'x' is no whole number of at least 1"),
        ("speculation", ["--case", "copy"], "copy-greedy"),
    ],
)
def test_a_wrong_value(
    name: str, flags: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *flags])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"nanoserve.bench.{name}").main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
