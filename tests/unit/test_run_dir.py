"""The private directory of a run: short enough, private, gone afterwards, and gone after a killed supervisor too."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from nanoserve.errors import StartupError
from nanoserve.ipc.endpoints import create_run_dir, next_life, remake_run_dir, remove_run_dir, shared_run_dir

_MAKE = "import sys; from pathlib import Path; from nanoserve.ipc.endpoints import create_run_dir as make"


@pytest.fixture
def base() -> Path:
    """Short: a test's own directory may leave no room for a socket's name."""
    return Path(tempfile.mkdtemp(dir="/tmp"))


@pytest.mark.rule(5)
def test_the_directory_is_private_and_removed(base: Path) -> None:
    endpoints = create_run_dir(base)
    assert endpoints.run_dir.parent == base
    assert endpoints.run_dir.stat().st_mode & 0o777 == 0o700
    remove_run_dir(endpoints)
    assert not endpoints.run_dir.exists()
    base.rmdir()


@pytest.mark.rule(5)
def test_the_directory_of_a_killed_supervisor_goes_with_the_next_start_and_a_living_ones_stays(base: Path) -> None:
    code = f"{_MAKE}; print(make(Path(sys.argv[1])).run_dir, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(base)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        ours = create_run_dir(base)
        assert theirs.exists()
        other.kill()
    third = create_run_dir(base)
    assert not theirs.exists()
    assert ours.run_dir.exists()
    for endpoints in (ours, third):
        remove_run_dir(endpoints)
    base.rmdir()


def test_a_directory_that_is_just_being_made_stays(base: Path) -> None:
    fresh = base / "nanoserve-fresh"
    fresh.mkdir()
    remove_run_dir(create_run_dir(base))
    assert fresh.exists()
    fresh.rmdir()
    base.rmdir()


@pytest.mark.rule(6)
def test_a_removed_directory_is_made_again_unless_its_name_was_taken(base: Path) -> None:
    endpoints = create_run_dir(base)
    remove_run_dir(endpoints)
    remake_run_dir(endpoints)
    assert endpoints.run_dir.stat().st_mode & 0o777 == 0o700
    again = create_run_dir(base)
    assert endpoints.run_dir.exists() and (endpoints.run_dir / "lock").exists()  # so that it goes with us
    endpoints.run_dir.chmod(0o777)
    with pytest.raises(StartupError, match="not private"):
        remake_run_dir(endpoints)
    for made in (endpoints, again):
        remove_run_dir(made)
    base.rmdir()


def test_a_path_too_long_for_sockets_is_not_used(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    endpoints = create_run_dir(long)
    assert endpoints.run_dir.parent != long
    assert not list(long.iterdir())
    remove_run_dir(endpoints)
    with pytest.raises(StartupError, match="too long"):
        shared_run_dir(long / "run", "api")


def test_lives_are_counted(base: Path) -> None:
    endpoints = shared_run_dir(base / "ring", "engine")
    assert [next_life(endpoints, "engine-0") for _ in range(3)] == [1, 2, 3]
    assert next_life(endpoints, "detok-0") == 1
    (base / "ring" / "engine-0.life").write_text("junk")
    assert next_life(endpoints, "engine-0") == 1
    remove_run_dir(endpoints)
    base.rmdir()


def test_a_life_is_never_counted_twice_though_no_file_can_be_written(base: Path) -> None:
    """With the ids of an earlier life its requests would be taken for those that the engine has already."""
    endpoints = shared_run_dir(base / "ring", "engine")
    assert [next_life(endpoints, "engine-0") for _ in range(2)] == [1, 2]
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            next_life(endpoints, "engine-0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert next_life(endpoints, "engine-0") == 3
    remove_run_dir(endpoints)
    base.rmdir()


def test_a_directory_that_another_start_removed_meanwhile_is_not_used(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one took it for stale in the instant before the lock, and was done before we asked for it."""
    removed: list[Path] = []

    def lock(run_dir: Path, name: str = "lock") -> int:
        descriptor = os.open(run_dir / name, os.O_RDWR | os.O_CREAT)
        if not removed:
            shutil.rmtree(run_dir)
            removed.append(run_dir)
        return descriptor

    monkeypatch.setattr("nanoserve.ipc.endpoints._lock", lock)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    endpoints = create_run_dir(base)
    assert endpoints.run_dir.exists() and endpoints.run_dir not in removed
    remove_run_dir(endpoints)
    base.rmdir()
