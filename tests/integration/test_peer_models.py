"""bench.peers: what is installed, and the GGUF that llama.cpp gets, nothing half-made taken for finished."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from nanoserve.bench import peers
from nanoserve.bench.peers import quantized_gguf, source_gguf

_QUANTIZE = """#!/bin/sh
# llama-quantize --allow-requantize FROM TO KIND THREADS
printf 'made of ' > "$3"
[ -e "$2.broken" ] && echo 'tensor is odd' && exit 3
cat "$2" >> "$3"
printf ' as %s' "$4" >> "$3"
"""


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    tool = tmp_path / "llama.cpp/build/bin/llama-quantize"
    tool.parent.mkdir(parents=True)
    tool.write_text(_QUANTIZE)
    tool.chmod(0o755)
    return tmp_path / "llama.cpp"


def _gguf(root: Path, llama_cpp: Path, model: Path) -> Path:
    return source_gguf(root, llama_cpp, str(model), Path("prepared"))


def test_the_parts_of_a_model_are_joined_in_order(tmp_path: Path, llama_cpp: Path) -> None:
    for number, text in enumerate(("one ", "two ", "three")):
        (tmp_path / f"m.gguf.part{number:02}").write_text(text)

    joined = _gguf(tmp_path, llama_cpp, tmp_path / "m.gguf.part00")

    assert joined == tmp_path / "prepared.gguf"
    assert joined.read_text() == "one two three"


def test_a_model_that_is_one_file_is_given_as_it_is(tmp_path: Path, llama_cpp: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_text("weights")

    assert _gguf(tmp_path, llama_cpp, model) == model
    assert quantized_gguf(tmp_path, llama_cpp, model, Path("prepared"), "") == model


def test_what_a_failed_tool_left_is_made_again(tmp_path: Path, llama_cpp: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_text("weights")
    broken = tmp_path / "m.gguf.broken"
    broken.touch()

    with pytest.raises(SystemExit, match=r"(?s)tensor is odd.*llama-quantize.*exit code 3"):
        quantized_gguf(tmp_path, llama_cpp, model, Path("prepared"), "Q4_0")
    broken.unlink()
    made = quantized_gguf(tmp_path, llama_cpp, model, Path("prepared"), "Q4_0")

    assert made == tmp_path / "prepared-q4_0.gguf"
    assert made.read_text() == "made of weights as Q4_0"


def test_a_server_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    """Such as nanoserve with a --quantization that there is not."""
    code = "import sys; sys.exit('one\\nnanoserve: --quantization: bogus is none of them')"
    with pytest.raises(SystemExit) as ended, peers.running(peers.Peer("a", [sys.executable, "-c", code], 1), tmp_path):
        pass
    assert ended.value.code == (
        f"a did not become ready ({tmp_path}/a.log): nanoserve: --quantization: bogus is none of them"
    )


@pytest.mark.parametrize(
    ("names", "installed"),
    [
        (["llama-gguf"], ["llama.cpp"]),
        (["llama-gguf", "llama-q4-0"], ["llama.cpp"]),
        (["vllm"], ["vllm"]),
        (["vllm", "llama-gguf"], ["vllm", "llama.cpp"]),
        ([], []),
    ],
)
def test_only_the_peers_that_are_named_are_installed(
    names: list[str], installed: list[str], tmp_path: Path, llama_cpp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    model.write_text("weights")
    seen: list[str] = []

    def install(name: str, path: Path) -> Callable[[Path], Path]:
        return lambda root: (seen.append(name), path)[1]

    monkeypatch.setattr(peers, "install_vllm", install("vllm", tmp_path / "vllm/bin"))
    monkeypatch.setattr(peers, "install_llama_cpp", install("llama.cpp", llama_cpp))
    monkeypatch.setattr(peers, "prepare", lambda config, progress: Path("prepared"))

    ready = list(peers.peers(tmp_path, str(model), names, 2))

    assert [peer.name for peer in ready] == names
    assert seen == installed
