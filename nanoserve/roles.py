"""`--role engine` and `--role detok`: one process by itself, for container runtimes that start and restart each.

Owner: the launcher of that role. It prepares the model if need be, starts the one child, and ends as the child ends;
whoever started it starts it again. All roles meet in `--run-dir`, which they share; the api's launcher (`--role api`)
is where they report. A stop is a kill: the state of these processes is rebuilt by their peers, whatever ends them,
and an orderly end would tell the api that its requests are over.
"""

from __future__ import annotations

import logging
import os
import select
import signal
from pathlib import Path

import msgspec

from nanoserve.children import Child, Spawner, describe_exit
from nanoserve.config import ServerConfig
from nanoserve.errors import StartupError
from nanoserve.ipc.endpoints import Endpoints, next_life, shared_run_dir
from nanoserve.obs.logs import setup_logging, watchdog_file
from nanoserve.obs.terminal import Terminal
from nanoserve.obs.watchdog import StackFile
from nanoserve.wakeups import Wakeups

_log = logging.getLogger(__name__)

EXIT_CHILD_DIED = 70
_KILLED = (-signal.SIGKILL, -signal.SIGTERM)


def serve_role(config: ServerConfig) -> int:
    """Runs the engine or the detokenizer until it ends or a stop signal comes; returns the exit code."""
    role, terminal = config.processes.role, Terminal()
    endpoints = shared_run_dir(Path(config.processes.run_dir), role)
    config_file = endpoints.run_dir / f"{role}-0.json"
    config_file.write_bytes(msgspec.json.encode(config))
    spawner = Spawner(config, endpoints, config_file)
    spawner.log_dir.mkdir(parents=True, exist_ok=True)
    name = f"{role}-launcher"
    setup_logging(name, spawner.log_dir, config.obs.log_level, child=False)
    stacks = StackFile(watchdog_file(spawner.log_dir, name), name)
    wakeups = Wakeups()
    try:
        model_dir = _prepared(config, spawner, wakeups)
        if model_dir is None:
            return 0  # stopped meanwhile
        blame = _Blame(endpoints)
        if role == "engine":
            blame.settle()
        child = spawner.start(role, 0, next_life(endpoints, f"{role}-0"), str(model_dir))
        terminal.line(f"{child.name}, pid {child.pid}, life {child.incarnation}, in {endpoints.run_dir}")
        code = _wait(child, wakeups)
        if code is None:
            terminal.line("stopped")
            return 0
        if role == "engine" and code not in _KILLED:
            blame.remember()
        terminal.line(f"{child.name} (pid {child.pid}) ended with {describe_exit(code)}")
        return code if code in (0, 1) else EXIT_CHILD_DIED
    finally:
        wakeups.close()
        spawner.close()
        stacks.close()


class _Blame:
    """Whether the requests of the last step are to blame for the engine's end: only after a crash of its own."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._record = endpoints.step_record()
        self._crashed = endpoints.run_dir / "engine-0.crashed"

    def settle(self) -> None:
        if not self._crashed.exists():
            self._record.unlink(missing_ok=True)
        self._crashed.unlink(missing_ok=True)

    def remember(self) -> None:
        self._crashed.touch()


def _prepared(config: ServerConfig, spawner: Spawner, wakeups: Wakeups) -> Path | None:
    """The model's directory; None when a stop signal came first. StartupError when there is none."""
    from nanoserve.hub.resolve import find_prepared

    found = find_prepared(config)
    if found is not None:
        return found
    code = _wait(spawner.start("prepare", os.getpid(), 1), wakeups)
    if code is None:
        return None
    found = find_prepared(config)
    if code != 0 or found is None:
        raise StartupError(f"the model {config.model.model} could not be prepared")
    return found


def _wait(child: Child, wakeups: Wakeups) -> int | None:
    """The child's exit code; None when a stop signal came first (the child is gone then, too)."""
    wakeups.watch(child)
    poller = select.poll()
    poller.register(wakeups.fileno(), select.POLLIN)
    while not wakeups.stops:
        poller.poll()
        if child.pidfd in wakeups.ended():
            return child.reap()
    child.send_signal(signal.SIGKILL)
    child.reap()
    return None
