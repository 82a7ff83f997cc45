"""One log format and one capped log file per process.

Owner: every process sets up its own, once, before it does anything else. A line is
`time level process pid message`; it goes to `<process>.log` and, for children, to the terminal as well. Whatever
native code writes to stdout or stderr goes to the file too, so that a crash's last words stand beside the log.
A full disk costs lines of log (counted), never the process.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from pathlib import Path

FILE_ONLY = {"file_only": True}  # `extra=` of a line that the operator does not need, or is told by somebody else
MAX_LOG_BYTES = 64 << 20  # per file; one older file is kept beside it


class LineFormatter(logging.Formatter):
    """`2025-11-30 06:40:12.345 INFO engine-0 4711 message`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        return f"{clock}.{int(record.msecs):03d}"

    def format(self, record: logging.LogRecord) -> str:
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return f"{self.formatTime(record)} {record.levelname} {self._process} {os.getpid()} {text}"


class CappedFileHandler(logging.Handler):
    """Appends to a file; past the cap the file becomes `<name>.1` and a new one is begun."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES, *, owns_stdio: bool = False) -> None:
        super().__init__()
        self.lost_lines = 0
        self._path = path
        self._max_bytes = max_bytes
        self._owns_stdio = owns_stdio
        self._fd = -1
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size
        if self._owns_stdio:
            os.dup2(self._fd, 1)
            os.dup2(self._fd, 2)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = (self.format(record) + "\n").encode("utf-8", "replace")
            if self._size + len(data) > self._max_bytes:
                self._rotate()
            self._size += os.write(self._fd, data)
        except OSError:
            self.lost_lines += 1

    def _rotate(self) -> None:
        self._path.replace(self._path.with_name(self._path.name + ".1"))
        os.close(self._fd)
        self._open()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        super().close()


class TerminalHandler(logging.Handler):
    """Lines on the operator's terminal; clears a progress line that stands there."""

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._prefix = "\r\x1b[K" if os.isatty(fd) else ""

    def emit(self, record: logging.LogRecord) -> None:
        if record.__dict__.keys() >= FILE_ONLY.keys():
            return
        try:
            os.write(self._fd, f"{self._prefix}{self.format(record)}\n".encode("utf-8", "replace"))
        except OSError:
            self.setLevel(logging.CRITICAL + 1)  # the terminal is gone; the file remains


def log_file(directory: Path, process: str) -> Path:
    return directory / f"{process}.log"


def watchdog_file(directory: Path, process: str) -> Path:
    return directory / f"{process}.watchdog.log"


def setup_logging(process: str, directory: Path, level: str, *, child: bool) -> None:
    """Sends this process's log to `<directory>/<process>.log`; a child's also to the terminal it inherited.

    A child's stdout and stderr become the log file. OSError when the file cannot be opened.
    """
    terminal = os.dup(2) if child else -1
    handlers: list[logging.Handler] = [CappedFileHandler(log_file(directory, process), owns_stdio=child)]
    if child:
        handlers.append(TerminalHandler(terminal))
        sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, errors="replace", closefd=False)
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    for handler in handlers:
        handler.setFormatter(LineFormatter(process))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    set_level(level)
    logging.captureWarnings(True)


def set_level(level: str) -> None:
    """The least important line of ours that is written from now on: debug, info, warning or error."""
    logging.getLogger("nanoserve").setLevel(level.upper())


def last_lines(path: Path, count: int = 20) -> list[str]:
    """The end of a log, for the operator whose process died; empty when there is none."""
    try:
        with path.open("r", encoding="utf-8", errors="replace") as lines:
            return [line.rstrip("\n") for line in deque(lines, maxlen=count)]
    except OSError:
        return []
