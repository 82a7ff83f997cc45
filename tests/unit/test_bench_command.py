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
from nanoserve import bench
from nanoserve.bench.variants import QUANTIZATIONS, variant

_PARTS = {"detok_vllm"}  # started by another benchmark, in an environment of its own


def test_every_benchmark_is_a_command() -> None:
    files = (Path(nanoserve.__file__).parent / "bench").glob("*.py")
    programs = {file.stem for file in files if "\ndef main(" in file.read_text(encoding="utf-8")}
    assert programs - _PARTS == {name.replace("-", "_") for name in console._BENCHMARKS}


def test_bench_help_lists_every_benchmark_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["bench", "--help"], ["bench", "-h"], ["bench"]):
        assert console.main(argv) == 0
        shown = capsys.readouterr()
        lines = dict(line.split(None, 1) for line in shown.out.splitlines() if line.startswith("  "))
        assert lines.keys() == set(console._BENCHMARKS) and not shown.err
        assert not any("`python" in words or '"""' in words or len(words) < 20 for words in lines.values())
    assert lines["steps"] == "Times of single steps of the CPU engine, beside a probe of memory bandwidth"


def test_an_unknown_benchmark_is_said_to_be_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    assert console.main(["bench", "stesp"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("nanoserve: no benchmark is called 'stesp'; there are serve, ") and "detok-table" in line


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
    assert file.read_text(encoding="utf-8").count(f'bench.parser("{name}", __doc__)') == 1


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


def test_help_says_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    parser = bench.parser("steps", "One line.\n\nAnother part.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", nargs="+", default=[1, 8], help="how many")
    parser.add_argument("--share", default="90%", help="of 100 %%")
    parser.add_argument("--out", help="a file")
    parser.add_argument("--save", action="store_true", help="keep them")
    parser.add_argument("--extra", default={}, help="more")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "One line.\n\nAnother part.\n" in shown
    words = " ".join(shown.partition("options:")[2].split())
    assert "--seed SEED [0]" in words and "how many [1 8]" in words and "of 100 % [90%]" in words
    assert words.endswith("--out OUT a file --save keep them --extra EXTRA more")


def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parser("steps", "").parse_args(["--bogus"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "python -m nanoserve.bench.steps: unrecognized arguments: --bogus\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("accuracy", "--variants", "bogus"),
        ("accuracy", "--variants", "torch-int8"),
        ("accuracy", "--variants", "none:bogus"),
        ("steps", "--quantization", "bogus"),
        ("steps", "--quantization", "torch-float32"),
        ("speculation", "--quantization", "bogus"),
    ],
)
def test_a_quantization_that_is_none_is_refused_in_one_line(
    name: str, option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # also without a model: nothing may be opened before the names are known to be names
    monkeypatch.setattr(sys, "argv", ["nanoserve", "bench", name, "--model", "/nothing/there", option, value])
    with pytest.raises(SystemExit) as ended:
        console.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"nanoserve bench {name}: argument {option}: ") and value in line and "int8-dynamic" in line


@pytest.mark.slow
def test_accuracy_measures_every_quantization(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nanoserve", "bench", "accuracy", "--help"])
    with pytest.raises(SystemExit):
        console.main()
    words = " ".join(capsys.readouterr().out.split())
    assert f"torch-float32, torch-bfloat16, {', '.join(QUANTIZATIONS)}; with :int8 behind it" in words
    shown = words.partition("an int8 KV cache [")[2].partition("]")[0].split()
    assert set(shown) == {"torch-bfloat16", *QUANTIZATIONS}


def test_variants_are_names_of_the_server() -> None:
    assert [variant("torch-x")(name) for name in ("torch-x", "auto:int8", "int8-dynamic")] == [
        "torch-x", "auto:int8", "int8-dynamic",
    ]  # fmt: skip
