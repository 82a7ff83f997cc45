"""Compiles the C++ sources beside this file once per machine, and finds the result again. Engine process, `make setup`.

The library's name carries a hash of sources, flags, compiler and CPU features, so a change of any of them never meets
an old file. A plain g++ call takes a few seconds; torch's extension builder was the alternative at 18 s, and ties the
result to one version of torch. `python -m nanoserve.runner.native.build` builds ahead of the first start.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nanoserve.config import ModelConfig
from nanoserve.hub.cache import cache_root

Progress = Callable[[float], None]

_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = (
    *("-O3", "-std=c++20", "-fPIC", "-pthread", "-march=native", "-mprefer-vector-width=512", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized"),  # gcc 12 warns of its own headers
)
_CPU_FEATURES = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni", "f16c")
_TIMEOUT_S = 300.0
_STALE_AFTER_S = 3600.0


class NativeUnavailable(Exception):
    """The C++ engine cannot be had here; the message is one line for the operator."""


def default_cache_dir() -> Path:
    return cache_root(ModelConfig()) / "native"


def cpu_flags() -> frozenset[str]:
    """Feature names of the first CPU as Linux spells them; empty elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def missing_cpu_features() -> list[str]:
    """What the kernels need and this CPU lacks."""
    have = cpu_flags()
    return [name for name in _CPU_FEATURES if name not in have]


def find_compiler() -> str | None:
    """Path of $CXX, g++ or c++, whichever is there first."""
    names = [os.environ.get("CXX", ""), "g++", "c++"]
    return next((path for name in names if name and (path := shutil.which(name))), None)


def library_path(cache_dir: Path, progress: Progress = lambda part: None) -> Path:
    """The compiled library, made first where it is missing. `progress` gets the done part, 0..1, of a compilation.

    NativeUnavailable when the CPU is not enough, there is no compiler, or it fails.
    """
    missing = missing_cpu_features()
    if missing:
        raise NativeUnavailable(f"the CPU lacks {', '.join(missing)}")
    sources = sorted(_SOURCES.glob("*.cpp"))
    headers = sorted(_SOURCES.glob("*.h"))
    target = cache_dir / f"engine-{_key([*sources, *headers])}.so"
    if target.is_file():
        return target
    compiler = find_compiler()
    if compiler is None:
        raise NativeUnavailable("no C++ compiler (g++ or c++) is installed")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        _remove_stale(cache_dir)
        work = cache_dir / f".tmp-{os.getpid()}-{secrets.token_hex(4)}"
        work.mkdir()
        try:
            _compile(compiler, sources, work, progress)
            (work / "engine.so").replace(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as exc:
        raise NativeUnavailable(f"cannot write {cache_dir}: {exc.strerror or exc}") from exc
    return target


def _key(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    features = " ".join(sorted(cpu_flags()))
    digest.update("\0".join([*_FLAGS, platform.machine(), features, os.environ.get("CXX", "")]).encode())
    return digest.hexdigest()[:20]


def _compile(compiler: str, sources: list[Path], work: Path, progress: Progress) -> None:
    """One compiler per file, as many at once as there are cores; then the link."""
    objects = [work / f"{source.stem}.o" for source in sources]
    waiting = [[compiler, *_FLAGS, "-c", str(s), "-o", str(o)] for s, o in zip(sources, objects, strict=True)]
    steps, done = len(sources) + 1, 0
    running: list[subprocess.Popen[bytes]] = []
    try:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                # The output goes to a file: a pipe that nobody reads could fill up.
                with (work / "messages").open("ab") as messages:
                    running.append(subprocess.Popen(waiting.pop(0), stdout=messages, stderr=messages, cwd=work))
            _wait(running[0], work)
            running.pop(0)
            done += 1
            progress(done / steps)
    finally:
        for process in running:
            process.kill()
            process.wait()
    with (work / "messages").open("ab") as messages:
        link = [compiler, "-shared", "-pthread", *map(str, objects), "-o", "engine.so"]
        _wait(subprocess.Popen(link, stdout=messages, stderr=messages, cwd=work), work)
    progress(1.0)


def _wait(process: subprocess.Popen[bytes], work: Path) -> None:
    try:
        code = process.wait(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise NativeUnavailable(f"the C++ compiler took more than {_TIMEOUT_S:.0f} s") from None
    if code != 0:
        lines = (work / "messages").read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "error" in line] or lines[-1:] or ["no message"]
        raise NativeUnavailable(f"the C++ compiler failed: {errors[0][:300]}")


def _remove_stale(cache_dir: Path) -> None:
    """What killed builds left. Other libraries stay: other checkouts use them, and they are small."""
    limit = time.time() - _STALE_AFTER_S
    for path in cache_dir.glob(".tmp-*"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < limit:
                shutil.rmtree(path, ignore_errors=True)


def main() -> int:
    """Builds, says what happened in one line, and never fails: without the library the torch backend serves."""
    try:
        path = library_path(default_cache_dir())
        sys.stderr.write(f"native CPU engine: {path}\n")
    except NativeUnavailable as exc:
        sys.stderr.write(f"native CPU engine not available, the torch backend will serve: {exc}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
