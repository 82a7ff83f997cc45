"""The supervisor: binds the port, starts the ring in order, watches it, stops it in reverse order.

Owner: the launcher's process. It carries no traffic: it receives Ready, StartFailed and Heartbeat, and sends every api
the ServerStatus whenever that changes. One poll waits for messages, for the end of any child (pidfd) and for signals.

    bind ─► api ─► (prepare) ─► engine + detok ─► READY once the ring has turned ─► drain ─► exit
                         any child that dies: the open streams get an error, the log's end is shown, exit 70
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from pathlib import Path

import msgspec
import zmq

from nanoserve import __version__
from nanoserve.children import READY, STARTING, Child, Spawner, describe_exit
from nanoserve.config import ServerConfig
from nanoserve.errors import StartupError
from nanoserve.ipc.channels import Inbox, Outbox
from nanoserve.ipc.endpoints import Endpoints, create_run_dir, remove_run_dir
from nanoserve.ipc.link import EXIT_STREAMS_CUT
from nanoserve.ipc.messages import (
    PROTOCOL_VERSION,
    EngineFacts,
    Heartbeat,
    Ready,
    ServerStatus,
    StartFailed,
    SupervisorInbox,
)
from nanoserve.obs.logs import last_lines, setup_logging
from nanoserve.obs.terminal import Terminal, base_url, ready_lines

_log = logging.getLogger(__name__)

EXIT_CHILD_DIED = 70
_TURN_MS = 500
_STOP_GRACE_S = 5.0  # for a part that has nothing left to do
_BACKLOG = 4096


class ChildDied(Exception):
    """A part that should run has ended."""

    def __init__(self, child: Child, code: int) -> None:
        super().__init__(f"{child.name} (pid {child.pid}) ended with {describe_exit(code)}")
        self.child = child


class Wakeups:
    """One file descriptor that becomes readable when a child ends or a stop signal comes."""

    def __init__(self) -> None:
        self.stops = 0
        self._epoll = select.epoll()
        self._signal_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._signal_fd, select.EPOLLIN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self.stops += 1
        os.eventfd_write(self._signal_fd, 1)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def watch(self, child: Child) -> None:
        self._epoll.register(child.pidfd, select.EPOLLIN)

    def ended(self) -> set[int]:
        """The pidfds of children that have ended and are not reaped yet."""
        ready = {fd for fd, _ in self._epoll.poll(0)}
        if self._signal_fd in ready:
            ready.discard(self._signal_fd)
            os.eventfd_read(self._signal_fd)
        return ready

    def close(self) -> None:
        self._epoll.close()
        os.close(self._signal_fd)


def listen(host: str, port: int) -> socket.socket:
    """Binds and listens; StartupError with one line that names the address when that cannot be."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"cannot listen on {host}: {error.strerror or error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise StartupError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}") from None
    return sock


class Supervisor:
    """One run of the server. `run` returns the exit code; StartupError when a part could not start."""

    def __init__(self, config: ServerConfig, endpoints: Endpoints, sock: socket.socket, terminal: Terminal) -> None:
        self._config = config
        self._sock = sock
        self._terminal = terminal
        self._spawner = Spawner(config, endpoints, sock)
        self._wakeups = Wakeups()
        self._context = zmq.Context()
        self._inbox: Inbox[SupervisorInbox] = Inbox(
            self._context, endpoints.supervisor(), SupervisorInbox, wake_fd=self._wakeups.fileno()
        )
        self._apis = [Outbox(self._context, endpoints.api(index)) for index in range(config.api.api_workers)]
        self._children: dict[str, Child] = {}
        self._status = ServerStatus(stage="starting")
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
            self._kill(list(self._children.values()))
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
        self._spawn("engine", 0)
        self._spawn("detok", 0)

    def _spawn(self, role: str, index: int) -> None:
        last = self._children.get(f"{role}-{index}")
        child = self._spawner.start(role, index, last.incarnation + 1 if last else 1, self._status.model_dir)
        _log.info("started %s, pid %d, incarnation %d", child.name, child.pid, child.incarnation)
        self._wakeups.watch(child)
        self._children[child.name] = child
        self._publish()

    def _turn(self) -> None:
        """One wait: messages, ends of children, deadlines."""
        self._pump(_TURN_MS)
        for child, code in self._reap():
            if child.role == "prepare" and code == 0:
                continue
            raise ChildDied(child, code)
        if self._status.stage != "ready":
            self._check_start()

    def _check_start(self) -> None:
        if time.monotonic() - self._begun > self._config.obs.startup_timeout:
            late = [child for child in self._children.values() if child.state == STARTING]
            names = ", ".join(f"{child.name} ({child.stage or 'no word yet'})" for child in late)
            raise StartupError(
                f"not ready after {self._config.obs.startup_timeout:g} s, still starting: {names or 'the ring'}"
            )

    # ---- messages ----------------------------------------------------------------------------------------

    def _pump(self, timeout_ms: int) -> None:
        self._inbox.wait(timeout_ms)
        for message in self._inbox.drain():
            child = self._children.get(message.name)
            if child is None or child.incarnation != message.incarnation:
                continue  # a last word of an earlier life
            child.heard = time.monotonic()
            if isinstance(message, Heartbeat):
                self._on_heartbeat(child, message)
            elif isinstance(message, Ready):
                self._on_ready(child, message)
            elif isinstance(message, StartFailed) and not self._stopping:
                raise StartupError(f"{child.name}: {message.message}")

    def _on_heartbeat(self, child: Child, beat: Heartbeat) -> None:
        if child.hear(beat) and child.role in ("prepare", "engine") and child.state == STARTING:
            self._terminal.progress(child.stage, child.progress)
            self._publish(stage=child.stage, progress=child.progress)
        if beat.model_dir and child.role == "prepare" and not self._stopping:
            self._start_ring(Path(beat.model_dir))

    def _on_ready(self, child: Child, message: Ready) -> None:
        if message.protocol_version != PROTOCOL_VERSION:
            raise StartupError(f"{child.name} speaks protocol {message.protocol_version}, not {PROTOCOL_VERSION}")
        child.state = READY
        engine = message.engine or self._status.engine
        if message.ring_turned and self._status.stage != "ready":
            self._publish(stage="ready", progress=1.0, engine=engine)
            self._announce()
        else:
            self._publish(engine=engine)

    def _publish(
        self,
        *,
        stage: str = "",
        progress: float | None = None,
        model_dir: str = "",
        engine: EngineFacts | None = None,
        draining: bool = False,
        failed: str = "",
    ) -> None:
        """Tells every api what has changed; fields that are not given stay."""
        old = self._status
        status = ServerStatus(
            stage=stage or old.stage,
            progress=old.progress if progress is None else progress,
            model_dir=model_dir or old.model_dir,
            engine=engine or old.engine,
            processes=[child.facts() for child in self._children.values() if child.role != "prepare"],
            draining=draining or old.draining,
            failed=failed or old.failed,
        )
        if status != old:
            self._status = status
            for outbox in self._apis:
                outbox.send(status)

    def _announce(self) -> None:
        url = base_url(self._config.api.host, self._sock.getsockname()[1])
        seconds = time.monotonic() - self._begun
        for line in ready_lines(
            url, self._config.served_names[0], self._status.model_dir, self._status.processes, seconds
        ):
            self._terminal.line(line)

    # ---- the end -----------------------------------------------------------------------------------------

    def _reap(self) -> list[tuple[Child, int]]:
        ended = self._wakeups.ended()
        return [(child, child.reap()) for child in self._children.values() if child.alive and child.pidfd in ended]

    def _living(self, *roles: str) -> list[Child]:
        return [child for child in self._children.values() if child.alive and child.role in roles]

    def _drain(self) -> int:
        """Live streams finish within the drain timeout; then the ring stops in reverse order."""
        self._stopping = True
        apis = self._living("api")
        self._terminal.line(f"stopping: live streams have {self._config.api.drain_timeout:g} s to finish")
        self._publish(stage="draining", draining=True)
        for child in apis:
            child.send_signal(signal.SIGTERM)
        codes, finished = self._wait_for_end(apis, self._config.api.drain_timeout + _STOP_GRACE_S)
        in_time = finished and EXIT_STREAMS_CUT not in codes
        for role in ("detok", "engine", "prepare"):
            children = self._living(role)
            for child in children:
                # A part that is still loading has nothing to save and may be deep in native code.
                child.send_signal(signal.SIGTERM if child.state == READY else signal.SIGKILL)
            if self._wakeups.stops < 2:
                self._wait_for_end(children, _STOP_GRACE_S)
            self._kill(children)
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
        apis = self._living("api")
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
        while any(child.alive for child in children):
            now = time.monotonic()
            if now >= deadline or self._wakeups.stops >= 2:
                return codes, False
            if now - told >= 5.0:
                told = now
                waiting = ", ".join(child.name for child in children if child.alive)
                self._terminal.line(f"waiting for {waiting}, at most {deadline - now:.0f} s more")
            self._pump(min(_TURN_MS, max(1, int((deadline - now) * 1000))))
            codes += [code for child, code in self._reap() if child in children]
        return codes, True

    def _kill(self, children: list[Child]) -> None:
        for child in children:
            if child.alive:
                child.send_signal(signal.SIGKILL)
                child.reap()

    def _close(self) -> None:
        self._inbox.close()
        for outbox in self._apis:
            outbox.close()
        self._context.destroy(linger=0)
        self._spawner.close()
        self._wakeups.close()


def serve(config: ServerConfig) -> int:
    """Runs a server until it is told to stop or fails; returns the exit code. StartupError: one line."""
    terminal = Terminal()
    with contextlib.closing(listen(config.api.host, config.api.port)) as sock:
        endpoints = create_run_dir()
        try:
            endpoints.config_file.write_bytes(msgspec.json.encode(config))
            directory = Path(config.obs.log_dir or endpoints.run_dir)
            try:
                directory.mkdir(parents=True, exist_ok=True)
                setup_logging("supervisor", directory, config.obs.log_level, child=False)
            except OSError as error:
                raise StartupError(f"--log-dir {directory}: {error.strerror}") from None
            url = base_url(config.api.host, sock.getsockname()[1])
            terminal.line(f"nanoserve {__version__}, pid {os.getpid()}, listening on {url}")
            return Supervisor(config, endpoints, sock, terminal).run()
        finally:
            remove_run_dir(endpoints)
