"""Where the processes of one run meet: Unix sockets in a private directory with a random name.

Owner: the supervisor makes the directory (mode 0700) and removes it; children only read names from it. Names are
per run, so a restarted server never meets the peers of an earlier one. Nothing a user supplies is in a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nanoserve.errors import StartupError

_MAX_SOCKET_PATH = 107  # sun_path of Linux less its terminator
_LONGEST_NAME = "/supervisor.sock"
_PREFIX = "nanoserve-"
_LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """ZMQ addresses of one run, derived from the run directory alone."""

    run_dir: Path

    def engine(self, index: int = 0) -> str:
        return f"ipc://{self.run_dir}/engine-{index}.sock"

    def detok(self, index: int = 0) -> str:
        return f"ipc://{self.run_dir}/detok-{index}.sock"

    def api(self, index: int = 0) -> str:
        return f"ipc://{self.run_dir}/api-{index}.sock"

    def supervisor(self) -> str:
        return f"ipc://{self.run_dir}/supervisor.sock"

    def step_record(self, index: int = 0) -> Path:
        """Who is in the engine's step: survives a crash of the engine (`engine.suspects`)."""
        return self.run_dir / f"engine-{index}.step"

    def strikes(self, index: int = 0) -> Path:
        return self.run_dir / f"engine-{index}.strikes"

    def memory_file(self, name: str) -> Path:
        """The memory ledger that a process writes now and then (`obs.memory`)."""
        return self.run_dir / f"{name}.memory"

    @property
    def config_file(self) -> Path:
        return self.run_dir / "config.json"


def create_run_dir(parent: Path | None = None) -> Endpoints:
    """Makes the private directory; StartupError when no directory with a short enough path can be made."""
    candidates = [parent, Path(os.environ["XDG_RUNTIME_DIR"]) if "XDG_RUNTIME_DIR" in os.environ else None]
    candidates += [Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")]
    for base in candidates:
        if base is None or not os.access(base, os.W_OK):
            continue
        _remove_stale(base)
        made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        if len(os.fsencode(str(made))) + len(_LONGEST_NAME) <= _MAX_SOCKET_PATH:
            if _lock(made) is not None and (made / _LOCK).exists():
                return Endpoints(run_dir=made)
            continue  # another start took it for a stale one in the instant before the lock
        made.rmdir()
    raise StartupError("no writable directory with a path short enough for Unix sockets")


def remake_run_dir(endpoints: Endpoints) -> None:
    """Makes the directory anew where somebody has removed it. StartupError when what is there now is not private."""
    run_dir = endpoints.run_dir
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"the run directory {run_dir} was removed and cannot be made: {error.strerror}") from None
    if not is_private(run_dir):
        raise StartupError(f"the run directory {run_dir} was removed, and what is there now is not private")
    if not (run_dir / _LOCK).exists():
        _lock(run_dir)


def is_private(directory: Path) -> bool:
    """Whether nobody else can put anything there: the name of a removed directory is free for everyone."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _lock(run_dir: Path, name: str = _LOCK) -> int | None:
    """Holds the directory as long as the returned descriptor is open; None when another process holds it."""
    descriptor = os.open(run_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor  # the supervisor never closes its own: its end, however it comes, frees the lock


def _remove_stale(base: Path) -> None:
    """Directories whose supervisor was killed: nobody holds their lock. Those without one are being made just now."""
    for found in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if found.stat().st_uid != os.getuid() or not (found / _LOCK).exists():
                continue
            descriptor = _lock(found)
            if descriptor is not None:
                shutil.rmtree(found, ignore_errors=True)
                os.close(descriptor)


def shared_run_dir(path: Path, role: str) -> Endpoints:
    """The directory of processes that are started one by one; made when it is not there. StartupError.

    Only one launcher of a role may be there at a time: the sockets of a second one would replace the first one's.
    """
    run_dir = path.absolute()
    if len(os.fsencode(str(run_dir))) + len(_LONGEST_NAME) > _MAX_SOCKET_PATH:
        raise StartupError(f"--run-dir {run_dir}: the path is too long for Unix sockets")
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        is_free = _lock(run_dir, f"{role}.lock") is not None
    except OSError as error:
        raise StartupError(f"--run-dir {run_dir}: {error.strerror}") from None
    if not is_free:
        raise StartupError(f"--run-dir {run_dir}: another --role {role} is running there")
    return Endpoints(run_dir=run_dir)


def next_life(endpoints: Endpoints, name: str) -> int:
    """The incarnation of a process that is started by itself: one more than the last one's, counted in a file.

    The file always has the same length and is never truncated: a life is never counted twice because the last start
    was killed while it wrote, and a full disk has room for it. OSError when it cannot be made.
    """
    descriptor = os.open(endpoints.run_dir / f"{name}.life", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            life = int(os.pread(descriptor, 100, 0)) + 1
        except ValueError:
            life = 1
        os.pwrite(descriptor, b"%20d\n" % life, 0)
    finally:
        os.close(descriptor)
    return life


def remove_run_dir(endpoints: Endpoints) -> None:
    shutil.rmtree(endpoints.run_dir, ignore_errors=True)
