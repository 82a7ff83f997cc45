"""The supervisor: binds the port, starts the ring in order, watches it, stops it in reverse order.

Owner: the launcher's process. It carries no traffic: it receives Ready, StartFailed and Heartbeat, and sends every api
the ServerStatus whenever that changes. One poll waits for messages, for the end of any child (pidfd) and for signals.

    bind ─► api ─► (prepare) ─► engine + detok ─► READY once the ring has turned ─► drain ─► exit
                    a child that dies is started again with the next incarnation; a child that dies before it ever
                    was ready, or too often, ends the server: open streams get an error, its log's end is shown
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from nanoserve import __version__
from nanoserve.children import READY, RESTARTING, STARTING, Child, Spawner, describe_exit
from nanoserve.config import ServerConfig
from nanoserve.errors import StartupError
from nanoserve.ipc.channels import Inbox, Outbox
from nanoserve.ipc.endpoints import (
    Endpoints,
    create_run_dir,
    next_life,
    remake_run_dir,
    remove_run_dir,
    shared_run_dir,
)
from nanoserve.ipc.link import EXIT_STREAMS_CUT
from nanoserve.ipc.messages import (
    PROTOCOL_VERSION,
    ApiGone,
    Heartbeat,
    Ready,
    StartFailed,
    SupervisorInbox,
)
from nanoserve.listening import base_url, listening
from nanoserve.obs.logs import last_lines, setup_logging, watchdog_file
from nanoserve.obs.terminal import Terminal, ready_lines
from nanoserve.obs.watchdog import StackFile
from nanoserve.restarts import RestartPlan
from nanoserve.roles import serve_role
from nanoserve.status_board import StatusBoard
from nanoserve.wakeups import ChildTable, Wakeups

_log = logging.getLogger(__name__)

EXIT_CHILD_DIED = 70
_TURN_MS = 500
_SETTLED_S = 5.0  # an engine that has been ready for so long is given a standby
_STOP_GRACE_S = 5.0  # for a part that has nothing left to do
_STOP_ORDER = ("api", "detok", "engine", "prepare")  # against the ring, so that nobody talks to the dead


class ChildDied(Exception):
    """A part that should run has ended."""

    def __init__(self, child: Child, code: int) -> None:
        super().__init__(f"{child.name} (pid {child.pid}) ended with {describe_exit(code)}")
        self.child = child


class Supervisor:
    """One run of the server. `run` returns the exit code; StartupError when a part could not start."""

    def __init__(self, config: ServerConfig, endpoints: Endpoints, sock: socket.socket, terminal: Terminal) -> None:
        self._config = config
        self._endpoints = endpoints
        self._sock = sock
        self._terminal = terminal
        self._spawner = Spawner(config, endpoints, endpoints.config_file, sock)
        self._wakeups = Wakeups()
        self._context = zmq.Context()
        self._inbox: Inbox[SupervisorInbox] = Inbox(
            self._context, endpoints.supervisor(), SupervisorInbox, wake_fd=self._wakeups.fileno()
        )
        self._board = StatusBoard(self._context, endpoints, config.api.api_workers)
        self._engine = Outbox(self._context, endpoints.engine())
        self._children = ChildTable(self._wakeups)
        self._restarts = RestartPlan(config.obs.max_restarts)
        self._stopping = False
        self._begun = time.monotonic()

    # ---- life --------------------------------------------------------------------------------------------

    def run(self) -> int:
        try:
            self._start()
            while not self._wakeups.stops:
                self._turn()
            return self._drain()
        except ChildDied as death:
            self._end_with_error(str(death), death.child)
            return EXIT_CHILD_DIED
        except StartupError as error:
            self._end_with_error(str(error), None)
            raise
        finally:
            self._children.kill(*_STOP_ORDER)
            self._close()

    def _start(self) -> None:
        from nanoserve.hub.resolve import find_prepared

        for index in range(self._config.api.api_workers):
            self._spawn("api", index)
        found = find_prepared(self._config)
        if found is None:
            self._spawn("prepare", 0)
        else:
            self._start_ring(found)

    def _start_ring(self, model_dir: Path) -> None:
        self._publish(stage="loading", progress=0.0, model_dir=str(model_dir))
        if not self._is_api_alone:
            self._spawn("engine", 0)
            self._spawn("detok", 0)

    @property
    def _is_api_alone(self) -> bool:
        """With `--role api` the other processes are somebody else's children; they tell us what they do."""
        return self._config.processes.role == "api"

    def _spawn(self, role: str, index: int) -> None:
        name = f"{role}-{index}"
        last = self._children.get(name)
        life = next_life(self._endpoints, name) if self._is_api_alone else last.incarnation + 1 if last else 1
        if not self._endpoints.config_file.exists():
            _log.error("%s was removed: it is made again", self._endpoints.run_dir)
            remake_run_dir(self._endpoints)
            self._endpoints.config_file.write_bytes(msgspec.json.encode(self._config))
        child = self._spawner.start(role, index, life, self._board.status.model_dir)
        if role == "api" and life > 1:
            self._engine.send(ApiGone(index, life - 1))
        child.state = RESTARTING if last else STARTING
        _log.info("started %s, pid %d, incarnation %d", child.name, child.pid, child.incarnation)
        self._children.add(child)
        self._publish()

    def _turn(self) -> None:
        """One wait: messages, ends of children, restarts that are due, deadlines."""
        self._pump(self._restarts.patience_ms(time.monotonic(), _TURN_MS))
        for child, code in self._children.reap():
            self._on_death(child, code)
        self._restart_due()
        if self._board.status.stage != "ready" and not self._is_api_alone:
            self._check_start()
        self._keep_standby()
        obs = self._config.obs
        if self._children.check_pulses(time.monotonic(), obs.watchdog_hard, obs.startup_timeout):
            self._publish()

    def _on_death(self, child: Child, code: int) -> None:
        """Plans a restart. ChildDied when there is none left, or the process never was ready in its first life."""
        if child.role == "prepare" and code == 0:
            return
        if child.role == "api":
            self._engine.send(ApiGone(child.index, child.incarnation))  # at once, not when it is back
        told_to_end = code in (0, -signal.SIGKILL, -signal.SIGTERM)
        if child.role == "engine" and told_to_end and not child.condemned:
            self._endpoints.step_record(child.index).unlink(missing_ok=True)  # no request is to blame
        now = time.monotonic()
        lived_s = now - child.ready_since if child.ready_once else 0.0
        # Where the ring has turned all of them have been ready, whether or not we have heard of it.
        may_return = child.ready_once or child.incarnation > 1 or self._board.status.stage == "ready"
        wait_s = self._restarts.add(child.name, now, lived_s) if may_return else None
        if wait_s is None:
            raise ChildDied(child, code)
        again = f" in {wait_s:.1f} s" if wait_s else ""
        text = f"{child.name} (pid {child.pid}) ended with {describe_exit(code)}, restarting{again}"
        self._terminal.line(text, logging.WARNING)
        self._publish()

    def _restart_due(self) -> None:
        for name in self._restarts.take_due(time.monotonic()):
            role, _, index = name.rpartition("-")
            self._spawn(role, int(index))

    def _keep_standby(self) -> None:
        """Not before the engine has caught up with its streams: importing takes one core for about a second."""
        engine = self._children.get("engine-0")
        if not self._config.engine.standby_engine or engine is None or engine.state != READY or not engine.is_ours:
            return
        is_settled = time.monotonic() - engine.ready_since >= _SETTLED_S and self._board.status.stage == "ready"
        if is_settled and not self._spawner.has_standby(engine.name):
            self._spawner.keep_standby(engine.role, engine.index, self._board.status.model_dir)

    def _check_start(self) -> None:
        if time.monotonic() - self._begun > self._config.obs.startup_timeout:
            late = [child for child in self._children.all() if child.state == STARTING]
            names = ", ".join(f"{child.name} ({child.stage or 'no word yet'})" for child in late)
            raise StartupError(
                f"not ready after {self._config.obs.startup_timeout:g} s, still starting: {names or 'the ring'}"
            )

    # ---- messages ----------------------------------------------------------------------------------------

    def _pump(self, timeout_ms: int) -> None:
        self._inbox.wait(timeout_ms)
        for message in self._inbox.drain():
            child = self._children.get(message.name)
            if self._is_api_alone and (child is None or message.incarnation > child.incarnation):
                child = self._children.meet(message, self._spawner.log_dir)
            if child is None or child.incarnation != message.incarnation:
                continue  # a last word of an earlier life
            child.heard = time.monotonic()
            if isinstance(message, Heartbeat):
                self._on_heartbeat(child, message)
            elif isinstance(message, Ready):
                self._on_ready(child, message)
            elif isinstance(message, StartFailed) and not self._stopping:
                if child.incarnation == 1 and child.is_ours:
                    raise StartupError(f"{child.name}: {message.message}")
                self._terminal.line(f"{child.name} cannot start: {message.message}")

    def _on_heartbeat(self, child: Child, beat: Heartbeat) -> None:
        if child.hear(beat) and child.role in ("prepare", "engine") and child.state == STARTING:
            self._terminal.progress(child.stage, child.progress)
            self._publish(stage=child.stage, progress=child.progress)
        if beat.model_dir and child.role == "prepare" and not self._stopping:
            self._start_ring(Path(beat.model_dir))

    def _on_ready(self, child: Child, message: Ready) -> None:
        if message.protocol_version != PROTOCOL_VERSION:
            raise StartupError(f"{child.name} speaks protocol {message.protocol_version}, not {PROTOCOL_VERSION}")
        child.pid = message.pid
        if not child.ready_once:
            if child.incarnation > 1:
                self._terminal.line(f"{child.name} (pid {child.pid}) is back, life {child.incarnation}")
            child.state, child.ready_once, child.ready_since = READY, True, time.monotonic()
        engine = message.engine or self._board.status.engine
        child.ring_turned |= message.ring_turned
        # every api process: they share the port, and the kernel gives a client to any of them
        all_turned = message.ring_turned and all(api.ring_turned for api in self._children.living("api"))
        if all_turned and self._board.status.stage != "ready" and not self._stopping:
            self._publish(stage="ready", progress=1.0, engine=engine)
            self._announce()
        else:
            self._publish(engine=engine)

    def _publish(self, **changes: Any) -> None:
        self._board.publish(self._children.all(), **changes)

    def _announce(self) -> None:
        url = base_url(self._config.api, self._sock)
        seconds = time.monotonic() - self._begun
        api, status = self._config.api, self._board.status
        for line in ready_lines(
            url,
            self._config.served_names[0],
            status.model_dir,
            status.processes,
            seconds,
            needs_key=bool(api.api_key or api.api_key_file),
        ):
            self._terminal.line(line)

    # ---- the end -----------------------------------------------------------------------------------------

    def _drain(self) -> int:
        """Live streams finish within the drain timeout; then the ring stops in reverse order."""
        self._stopping = True
        apis = self._children.living("api")
        self._terminal.line(
            f"stopping on {self._wakeups.last_stop}: live streams have {self._config.api.drain_timeout:g} s to finish"
        )
        self._publish(stage="draining", draining=True)
        for child in apis:
            child.send_signal(signal.SIGTERM)
        codes, finished = self._wait_for_end(apis, self._config.api.drain_timeout + _STOP_GRACE_S)
        in_time = finished and not any(codes)
        self._restarts.clear()
        for role in _STOP_ORDER[1:]:
            children = self._children.living(role)
            for child in children:
                # A part that is still loading has nothing to save and may be deep in native code.
                child.send_signal(signal.SIGTERM if child.state == READY else signal.SIGKILL)
            if self._wakeups.stops < 2:
                self._wait_for_end(children, _STOP_GRACE_S)
            self._children.kill(role)
        self._terminal.line("stopped" if in_time else "stopped: streams that did not finish in time were cut")
        return 0 if in_time else EXIT_STREAMS_CUT

    def _end_with_error(self, reason: str, dead: Child | None) -> None:
        """Open streams get an error event and their terminator; the operator gets the dead child's last words."""
        self._stopping = True
        self._terminal.line(f"nanoserve ends: {reason}" if dead else "nanoserve cannot start")
        if dead is not None:
            for line in last_lines(dead.log):
                self._terminal.line(f"  {line}")
        self._publish(stage="failed", failed=reason)
        apis = self._children.living("api")
        for child in apis:
            child.send_signal(signal.SIGTERM)
        self._wait_for_end(apis, _STOP_GRACE_S)

    def _wait_for_end(self, children: list[Child], timeout_s: float) -> tuple[list[int], bool]:
        """Waits until these children have ended, the time is up, or a second stop signal comes.

        Returns the exit codes seen and whether all have ended. Heartbeats are read on, progress is shown.
        """
        deadline = time.monotonic() + timeout_s
        codes: list[int] = []
        told = time.monotonic()
        while any(child.is_ours for child in children):
            now = time.monotonic()
            if now >= deadline or self._wakeups.stops >= 2:
                return codes, False
            if now - told >= 5.0:
                told = now
                waiting = ", ".join(child.name for child in children if child.is_ours)
                self._terminal.line(f"waiting for {waiting}, at most {deadline - now:.0f} s more")
            self._pump(max(1, min(self._restarts.patience_ms(now, _TURN_MS), int((deadline - now) * 1000))))
            for child, code in self._children.reap():
                if child in children:
                    codes.append(code if child.ready_once else 0)  # one that never served cut nobody's stream
                elif self._board.status.draining and self._children.living("api"):
                    self._on_death(child, code)  # the streams that are finishing need it
            self._restart_due()
        return codes, True

    def _close(self) -> None:
        self._inbox.close()
        self._board.close()
        self._engine.close()
        self._context.destroy(linger=0)
        self._spawner.close()
        self._wakeups.close()


def serve(config: ServerConfig) -> int:
    """Runs a server until it is told to stop or fails; returns the exit code. StartupError: one line."""
    if config.processes.role in ("engine", "detok"):
        return serve_role(config)
    terminal = Terminal()
    with listening(config.api) as sock:
        run_dir = config.processes.run_dir
        endpoints = shared_run_dir(Path(run_dir), config.processes.role) if run_dir else create_run_dir()
        try:
            endpoints.config_file.write_bytes(msgspec.json.encode(config))
            directory = Path(config.obs.log_dir or endpoints.run_dir)
            try:
                directory.mkdir(parents=True, exist_ok=True)
                setup_logging("supervisor", directory, config.obs.log_level, child=False)
                stacks = StackFile(watchdog_file(directory, "supervisor"), "supervisor")
            except OSError as error:
                raise StartupError(f"--log-dir {directory}: {error.strerror}") from None
            url = base_url(config.api, sock)
            terminal.line(f"nanoserve {__version__}, pid {os.getpid()}, listening on {url}")
            with contextlib.closing(stacks):
                return Supervisor(config, endpoints, sock, terminal).run()
        finally:
            if not run_dir:
                remove_run_dir(endpoints)
