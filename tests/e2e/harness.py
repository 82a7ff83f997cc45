"""Servers as real processes, for tests: start, wait for READY, talk HTTP, look at logs, stop.

Everything runs as an operator would run it: `python -m nanoserve.launch_server ...` on a port that the system picks.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.sse_grammar import SseParser

START_TIMEOUT_S = 90.0
_LISTENING = re.compile(r"listening on (http://\S+)")
_PID = re.compile(r"(\w+-\d+) (\d+)")


def _default_signals() -> None:
    """Undoes what a background job's shell or `nohup` has set: a server leaves ignored signals ignored."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Server:
    """One launcher with its children. Use it as a context manager, or `stop()` it."""

    def __init__(self, *args: str, log_dir: Path, env: dict[str, str] | None = None) -> None:
        self.log_dir = log_dir
        self.pids: dict[str, int] = {}
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nanoserve.launch_server", "--port", "0", "--log-dir", str(log_dir), *args],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, **(env or {})},
            preexec_fn=_default_signals,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append(line.rstrip("\n"))
                if "  pids: " in line:
                    self.pids.update({name: int(pid) for name, pid in _PID.findall(line)})
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    # ---- what it said ------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """The launcher's."""
        return self._process.pid

    @property
    def run_dir(self) -> Path:
        """The directory of its sockets: the launcher holds a lock in it as long as it lives."""
        links = [fd.readlink() for fd in Path(f"/proc/{self.pid}/fd").iterdir() if fd.is_symlink()]
        (lock,) = (link for link in links if link.name == "lock")
        return lock.parent

    @property
    def output(self) -> str:
        with self._changed:
            return "\n".join(self._lines)

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def wait_for_output(self, text: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns once the launcher has printed `text`; AssertionError with all it printed when it does not."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not any(text in line for line in self._lines):
                left = deadline - time.monotonic()
                if left <= 0 or (self._process.poll() is not None and not self._reader.is_alive()):
                    raise AssertionError(f"no {text!r} in the launcher's output:\n" + "\n".join(self._lines))
                self._changed.wait(min(left, 0.5))

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Server:
        self.wait_for_output("  pids: ", timeout_s)
        return self

    @property
    def base_url(self) -> str:
        self.wait_for_output("listening on ")
        found = _LISTENING.search(self.output)
        assert found is not None
        return found.group(1)

    def log(self, process: str, kind: str = "log") -> str:
        """`log("engine-0")`, `log("engine-0", "watchdog.log")`; empty when there is none."""
        path = self.log_dir / f"{process}.{kind}"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    # ---- HTTP --------------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 60.0) -> http.client.HTTPConnection:
        parts = urlsplit(self.base_url)
        return http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)

    def get(self, path: str, timeout_s: float = 60.0) -> tuple[int, Any]:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> tuple[int, Any]:
        return self._call("POST", path, body, timeout_s)

    def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> tuple[int, Any]:
        connection = self.connect(timeout_s)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            data = response.read()
            kind = response.headers.get_content_type()
            return response.status, json.loads(data) if kind == "application/json" and data else data.decode()
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> Iterator[str]:
        """The `data:` payloads of a streamed answer, `[DONE]` included, through the strict parser.

        Closing the generator hangs up.
        """
        connection = self.connect(timeout_s)
        parser = SseParser()
        try:
            payload = json.dumps({**body, "stream": True})
            connection.request("POST", path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise AssertionError(f"status {response.status}: {response.read()!r}")
            for line in response:
                for event in parser.feed(line):
                    yield event.data
            parser.close()
        finally:
            connection.close()

    # ---- the end -----------------------------------------------------------------------------------------

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait_exit(self, timeout_s: float = 30.0) -> int:
        code = self._process.wait(timeout_s)
        self._reader.join(5.0)
        return code

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM, then SIGKILL when that is not enough; returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            code = self.wait_exit(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self.wait_exit()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def children_of(pid: int) -> list[int]:
    """Pids of all living children of a launcher, by parent link."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == pid and fields[0] not in "ZX":
                children.append(int(entry.name))
    return children


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.02)
