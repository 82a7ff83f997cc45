"""The inside of every child process: `python -m nanoserve.child ROLE ...`, started by the supervisor only.

Before anything heavy is imported the child makes sure that it cannot outlive its parent, in two ways that both work
inside long native calls: the kernel's parent-death signal, and a thread that waits for the end of a pipe which the
supervisor holds open. Then come the log, the watchdog, the stop signal and the link; then the role's own `run`.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import zmq

from nanoserve.config import ServerConfig
from nanoserve.errors import NanoserveError, StartupError
from nanoserve.ipc.channels import Outbox
from nanoserve.ipc.endpoints import Endpoints
from nanoserve.ipc.link import STANDBY, Watchdog
from nanoserve.ipc.messages import EngineFacts, Heartbeat, Ready, StartFailed
from nanoserve.obs.logs import FILE_ONLY, setup_logging, watchdog_file
from nanoserve.obs.memory import write_ledger
from nanoserve.obs.proc import LINE_S, ProcessUsage
from nanoserve.obs.watchdog import LoopWatchdog

_log = logging.getLogger("nanoserve.child")

EXIT_START_FAILED = 1
EXIT_CRASHED = 70
EXIT_PARENT_GONE = 72
PULSE_S = 0.5
_LEDGER_S = 10.0
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, death_fd: int) -> None:
    """Ends this process when its parent ends, however that happens. `death_fd` is the read end of its pipe."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(EXIT_PARENT_GONE)

    def wait_for_end() -> None:
        os.read(death_fd, 1)  # nothing is ever written: this returns at end of file
        os._exit(EXIT_PARENT_GONE)

    threading.Thread(target=wait_for_end, name="parent-death", daemon=True).start()


class StopSignal:
    """SIGTERM as a flag and a readable file descriptor. SIGINT and SIGHUP are the supervisor's alone."""

    def __init__(self) -> None:
        self.requested = False
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        signal.signal(signal.SIGTERM, self._on_signal)
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, *_: object) -> None:
        self.requested = True
        os.eventfd_write(self.fd, 1)


class Link:
    """Implements `nanoserve.ipc.link.ProcessLink`. Thread-safe: the loop and the pulse thread both send."""

    def __init__(
        self,
        name: str,
        index: int,
        incarnation: int,
        outbox: Outbox,
        watchdog: LoopWatchdog,
        *,
        ledger_file: Path,
    ) -> None:
        self._ledger_file = ledger_file
        self.name = name
        self.index = index
        self.incarnation = incarnation
        self.watchdog: Watchdog = watchdog
        self._loop = watchdog
        self.is_ready = False
        self._announcement: Ready | None = None
        self._stop = StopSignal()
        self._outbox = outbox
        self._lock = threading.Lock()
        self._usage = ProcessUsage()
        self._usage_due = time.monotonic() + LINE_S
        self._ledger_due = 0.0

    @property
    def stop_requested(self) -> bool:
        return self._stop.requested

    @property
    def stop_fd(self) -> int:
        return self._stop.fd

    def stage(self, stage: str, progress: float = 0.0, *, model_dir: str = "") -> None:
        self._send(Heartbeat(self.name, self.incarnation, stage, progress, model_dir))

    def ready(self, engine: EngineFacts | None = None, *, ring_turned: bool = False) -> None:
        """Tells the supervisor; from the first call on the watchdog watches."""
        self._announcement = Ready(self.name, self.incarnation, os.getpid(), engine=engine, ring_turned=ring_turned)
        self._send(self._announcement)
        self._ledger_due = 0.0
        if not self.is_ready:
            # What has been loaded stays for life: out of the collector's sight, so that it never pauses for it.
            gc.freeze()
            gc.enable()
            self.is_ready = True

    def start_failed(self, message: str) -> None:
        self._send(StartFailed(self.name, self.incarnation, message))

    def pulse(self, now: float) -> None:
        """One turn of the pulse thread: checks the loop, tells the supervisor, logs the usage once a minute."""
        late = self._loop.check(now) if self.is_ready else 0.0
        doing = self._loop.doing
        self._send(Heartbeat(self.name, self.incarnation, late_s=late, doing=doing[0] if doing else ""))
        if self._announcement is not None:
            self._send(self._announcement)  # it may have been lost, or who listens was started a moment ago
        if now >= self._ledger_due and self.is_ready:
            self._ledger_due = now + _LEDGER_S
            write_ledger(self._ledger_file)
        if now >= self._usage_due:
            self._usage_due = now + LINE_S
            _log.info("%s", self._usage.line())

    def _send(self, message: msgspec.Struct) -> None:
        with self._lock:
            self._outbox.send(message)


def _beat(link: Link, ended: threading.Event) -> None:
    """A process without a pulse would be without a watchdog: it ends instead."""
    try:
        while not ended.wait(PULSE_S):
            link.pulse(time.monotonic())
    except Exception:
        _log.exception("the pulse thread failed, this process ends")
        os._exit(EXIT_CRASHED)


def _plant_faults(config: ServerConfig, link: Link) -> None:
    """Only for tests: makes this process fail as `--fault` says."""
    from nanoserve.obs.faults import FaultyEdge, FaultyWatchdog, faults_for

    faults = faults_for(config.obs.fault, link.name, link.incarnation)
    if faults:
        _log.warning("faults on purpose: %s", faults)
        link.watchdog = FaultyWatchdog(link.watchdog, faults)
        Outbox.tamper = FaultyEdge(faults)


def _stand_by(role: str, config: ServerConfig) -> int:
    """Imports what the role needs, then waits; returns the incarnation that this process is to be."""
    importlib.import_module(f"nanoserve.{role}.process").preload(config)
    word = sys.stdin.readline()
    if not word:
        sys.exit(0)  # the supervisor ends
    return int(word)


def _run_role(role: str, config: ServerConfig, endpoints: Endpoints, link: Link, options: argparse.Namespace) -> int:
    """Imports the role's module here and nowhere else: api and detok must stay free of torch."""
    if role == "prepare":
        from nanoserve.hub.resolve import prepare

        link.stage("model ready", 1.0, model_dir=str(prepare(config, link.stage)))
        return 0
    module: Any = importlib.import_module(f"nanoserve.{role}.process")
    if role == "api":
        # The file descriptor stays open in the supervisor: connections wait there while an api restarts.
        code = module.run(config, endpoints, link, socket.socket(fileno=options.listen_fd))
    else:
        code = module.run(config, Path(options.model_dir), endpoints, link)
    return code or 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nanoserve.child")
    parser.add_argument("role", choices=("api", "engine", "detok", "prepare"))
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--incarnation", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--config-file", type=Path, required=True)
    parser.add_argument("--model-dir", default="")
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--death-fd", type=int, required=True)
    parser.add_argument("--listen-fd", type=int, default=-1)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = _parse(argv)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the watchdog log is open: a standby waits before that
    die_with_parent(options.parent, options.death_fd)
    if options.role != "prepare":
        gc.disable()  # until `Link.ready`: what a start makes stays for life, so the collector would find nothing
    name = f"{options.role}-{options.index}"
    endpoints = Endpoints(run_dir=options.run_dir)
    config = msgspec.json.decode(options.config_file.read_bytes(), type=ServerConfig)
    if options.incarnation == STANDBY:
        setproctitle.setproctitle(f"nanoserve: {name}, standby")
        options.incarnation = _stand_by(options.role, config)
    setproctitle.setproctitle(f"nanoserve: {name}")
    directory = Path(config.obs.log_dir or endpoints.run_dir)
    if config.obs.log_dir:
        directory.mkdir(parents=True, exist_ok=True)  # somebody may have removed it since the launcher made it
    setup_logging(name, directory, config.obs.log_level, child=True)
    faulthandler.enable(file=sys.stderr, all_threads=True)
    watchdog = LoopWatchdog(
        name, watchdog_file(directory, name), soft_s=config.obs.watchdog_soft, hard_s=config.obs.watchdog_hard
    )
    context = zmq.Context()
    outbox = Outbox(context, endpoints.supervisor())
    link = Link(
        name,
        options.index,
        options.incarnation,
        outbox,
        watchdog,
        ledger_file=endpoints.memory_file(name),
    )
    ended = threading.Event()
    pulse = threading.Thread(target=_beat, args=(link, ended), name="pulse", daemon=True)
    pulse.start()
    try:
        if config.obs.fault:
            _plant_faults(config, link)
        return _run_role(options.role, config, endpoints, link, options)
    except NanoserveError as error:
        if link.is_ready and not isinstance(error, StartupError):
            _log.error("%s", error)
            return EXIT_CRASHED  # an api is ready before it loads: what stops it then is no crash
        is_told = config.processes.role in ("all", "api")  # by the supervisor, on the same terminal
        _log.error("%s", error, extra=FILE_ONLY if is_told else None)
        link.start_failed(str(error))
        return EXIT_START_FAILED
    except Exception:
        _log.exception("this process ends: an error that nothing expected")
        return EXIT_CRASHED
    finally:
        ended.set()
        pulse.join()
        outbox.close()
        context.term()
        watchdog.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
