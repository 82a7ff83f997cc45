"""Building and caching the C++ engine, its packed weights, and what the operator hears when it cannot be had."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import torch

from nanoserve.errors import StartupError
from nanoserve.runner.native import build
from nanoserve.runner.native.backend import NativeBackend, NativeOptions
from nanoserve.runner.native.build import NativeUnavailable
from nanoserve.runner.native.memory import allocate
from nanoserve.runner.native.packed_file import fingerprint
from nanoserve.runner.native.packing import Weights
from tests.runner.native_models import make_native, make_spec, make_weights

pytestmark = pytest.mark.slow
needs_cpu = pytest.mark.skipif(bool(build.missing_cpu_features()), reason="the CPU lacks what the engine needs")


def test_memory_that_the_system_does_not_have_is_said_in_one_line() -> None:
    with pytest.raises(StartupError, match="GiB of memory for kv cache"):
        allocate(1 << 60, "kv cache")


@needs_cpu
def test_builds_once_with_progress(tmp_path: Path) -> None:
    parts: list[float] = []
    path = build.library_path(tmp_path, parts.append)
    assert path.is_file() and parts == sorted(parts) and parts[-1] == 1.0
    parts.clear()
    assert build.library_path(tmp_path, parts.append) == path and parts == []
    assert [item.name for item in tmp_path.iterdir()] == [path.name]  # no leftovers


@needs_cpu
def test_changed_source_means_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "_SOURCES", sources)
    first = build.library_path(tmp_path / "cache")
    (sources / "one.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build.library_path(tmp_path / "cache") != first and first.is_file()
    (sources / "one.cpp").write_text("this is no C++\n")
    with pytest.raises(NativeUnavailable, match=r"compiler failed: .*error"):
        build.library_path(tmp_path / "cache")
    assert sum(1 for item in (tmp_path / "cache").iterdir()) == 2


@needs_cpu
def test_two_builders_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, cache = tmp_path / "csrc", tmp_path / "cache"
    sources.mkdir()
    (sources / "one.cpp").write_text('extern "C" int one() { return 1; }\n')
    monkeypatch.setattr(build, "_SOURCES", sources)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build.library_path(cache))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(paths)) == 1 and [item.name for item in cache.iterdir()] == [paths[0].name]


@needs_cpu
def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        build.library_path(tmp_path)


def test_weak_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2", "f16c"}))
    with pytest.raises(NativeUnavailable, match="lacks avx512f, avx512bw"):
        build.library_path(tmp_path)


@needs_cpu
def test_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailable, match="cannot write"):
        build.library_path(tmp_path / "file")


@needs_cpu
def test_second_start_reads_packed_weights_only(tmp_path: Path) -> None:
    spec = make_spec("qwen2")
    shutil.copy(build.library_path(build.default_cache_dir()), tmp_path)
    loads: list[int] = []

    def start(fingerprint: str) -> NativeBackend:
        def load() -> Weights:
            loads.append(1)
            return Weights(make_weights(spec), {})

        return NativeBackend(spec, load, NativeOptions(cache_dir=tmp_path, fingerprint=fingerprint, threads=2))

    first, second = start("a"), start("a")
    assert len(loads) == 1
    assert torch.equal(torch.from_numpy(first._packed.memory), torch.from_numpy(second._packed.memory))
    start("b")
    assert len(loads) == 2
    cached = next(tmp_path.glob("packed-a-*"))
    cached.write_bytes(cached.read_bytes()[:-1])
    start("a")
    assert len(loads) == 3
    cached.write_bytes(b"not packed weights")
    start("a")
    assert len(loads) == 4 and cached.stat().st_size > first._packed.num_bytes


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"abc")
    before = fingerprint([file])
    assert fingerprint([file]) == before
    file.write_bytes(b"abcd")
    assert fingerprint([file]) != before


@needs_cpu
def test_threads_sleep_between_steps_and_end_with_the_backend() -> None:
    make_native(make_spec("llama"), threads=1).close()  # whatever torch starts with its first work
    before = threading.active_count(), len(list(Path("/proc/self/task").iterdir()))
    backend = make_native(make_spec("llama"), threads=3)
    assert len(list(Path("/proc/self/task").iterdir())) == before[1] + 2
    used = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - used < 0.05
    backend.close()
    assert len(list(Path("/proc/self/task").iterdir())) == before[1]
