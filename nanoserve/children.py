"""Starting a child process, and the supervisor's record of one.

Owner: the supervisor process. Children run in sessions of their own, so that Ctrl-C reaches the supervisor alone, and
hold the read end of one pipe whose write end only the supervisor has: when it is gone, they end. A standby is a child
that has imported all that its role needs and waits for one word, its incarnation, to be that process (docs/adr/0012).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from nanoserve.config import ServerConfig
from nanoserve.ipc.endpoints import Endpoints
from nanoserve.ipc.link import STANDBY
from nanoserve.ipc.messages import Heartbeat, ProcessFacts
from nanoserve.obs.logs import log_file

STARTING, READY, STALLED, RESTARTING, DEAD = "starting", "ready", "stalled", "restarting", "dead"


@dataclass(slots=True)
class Child:
    """One life of one child. A restart makes a new record with the next incarnation."""

    role: str
    index: int
    incarnation: int
    pid: int
    log: Path
    process: subprocess.Popen[bytes] | None = None  # None: started by somebody else (`--role`), known by its messages
    pidfd: int = -1
    state: str = STARTING
    stage: str = ""
    progress: float = 0.0
    ready_once: bool = False
    ready_since: float = 0.0  # monotonic
    ring_turned: bool = False  # an api process that has seen one real token go round
    condemned: bool = False  # we ended it: it gave no sign of life
    late_s: float = 0.0
    doing: str = ""
    started_ns: int = field(default_factory=time.monotonic_ns)
    heard: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def is_ours(self) -> bool:
        """Whether it is a living child of this supervisor."""
        return self.process is not None and self.state != DEAD

    def facts(self) -> ProcessFacts:
        return ProcessFacts(self.name, self.pid, self.incarnation, self.state, self.started_ns)

    def hear(self, beat: Heartbeat) -> bool:
        """Takes a heartbeat in; True when it says something new about the start."""
        self.late_s, self.doing = beat.late_s, beat.doing
        if not beat.stage or (beat.stage, beat.progress) == (self.stage, self.progress):
            return False
        self.stage, self.progress = beat.stage, beat.progress
        return True

    def send_signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def reap(self) -> int:
        """Collects the exit status of a process that has ended; negative for a signal, as subprocess has it."""
        assert self.process is not None
        code = self.process.wait()
        os.close(self.pidfd)
        self.state = DEAD
        return code


def describe_exit(code: int) -> str:
    """`exit code 70` or `signal SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _begin(standby: subprocess.Popen[bytes], incarnation: int) -> bool:
    """Gives the word; False where the standby has ended."""
    assert standby.stdin is not None
    with contextlib.suppress(BrokenPipeError), standby.stdin as pipe:
        pipe.write(f"{incarnation}\n".encode())
    return standby.poll() is None


def child_environment(role: str, engine_threads: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Thread pools: the engine computes, the others must not take cores from it. `engine_threads` 0: one per core."""
    environment = dict(inherited)
    threads = engine_threads or len(os.sched_getaffinity(0))
    environment["OMP_NUM_THREADS"] = str(threads) if role == "engine" else "1"
    if role == "engine" and "OMP_WAIT_POLICY" not in inherited:
        # A thread of torch's pool spins some milliseconds for more to do (libgomp's default): into the next native
        # step, whose core it takes. Some 50 us do for torch, where one operation follows the other.
        environment.setdefault("GOMP_SPINCOUNT", "10000")
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment["PYTHONUNBUFFERED"] = "1"
    return environment


class Spawner:
    """Starts children that all know the same run directory, configuration and listening socket."""

    def __init__(
        self, config: ServerConfig, endpoints: Endpoints, config_file: Path, listen_socket: socket.socket | None = None
    ) -> None:
        self._config = config
        self._config_file = config_file
        self._endpoints = endpoints
        self._listen_socket = listen_socket
        self._death_fd, self._alive_fd = os.pipe()
        self._standbys: dict[str, subprocess.Popen[bytes]] = {}  # by process name

    @property
    def log_dir(self) -> Path:
        return Path(self._config.obs.log_dir or self._endpoints.run_dir)

    def start(self, role: str, index: int, incarnation: int, model_dir: str = "") -> Child:
        """Starts one process, or lets its standby begin; OSError when the system cannot."""
        name = f"{role}-{index}"
        standby = self._standbys.pop(name, None)
        if standby is not None and _begin(standby, incarnation):
            process = standby
        else:
            process = self._popen(role, index, incarnation, model_dir)
        return Child(
            role, index, incarnation, process.pid, log_file(self.log_dir, name), process, os.pidfd_open(process.pid)
        )

    def has_standby(self, name: str) -> bool:
        """Whether one was started since the last `start`. One that could not live is not tried again and again."""
        return name in self._standbys

    def keep_standby(self, role: str, index: int, model_dir: str) -> None:
        """Starts a process that waits to be the next life of this role."""
        self._standbys[f"{role}-{index}"] = self._popen(role, index, STANDBY, model_dir)

    def _popen(self, role: str, index: int, incarnation: int, model_dir: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nanoserve.child", role, "--index", str(index)]
        command += ["--incarnation", str(incarnation), "--run-dir", str(self._endpoints.run_dir)]
        command += ["--config-file", str(self._config_file)]
        command += ["--model-dir", model_dir, "--parent", str(os.getpid()), "--death-fd", str(self._death_fd)]
        inherited = [self._death_fd]
        if role == "api" and self._listen_socket is not None:
            command += ["--listen-fd", str(self._listen_socket.fileno())]
            inherited.append(self._listen_socket.fileno())
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE if incarnation == STANDBY else subprocess.DEVNULL,
            pass_fds=inherited,
            start_new_session=True,
            env=child_environment(role, self._config.engine.engine_threads, os.environ),
        )

    def close(self) -> None:
        """Ends the standbys; other children are not touched."""
        for standby in self._standbys.values():
            standby.kill()
            standby.communicate()
        os.close(self._death_fd)
        os.close(self._alive_fd)
