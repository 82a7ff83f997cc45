"""`nanoserve logs DIR`: the logs of all processes as one, in the order of time.

Owner: a command of its own. A line without a time of its own (a traceback, native output) belongs to the line before.
"""

from __future__ import annotations

import argparse
import heapq
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_STAMP = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d{3})?) ")
_LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One log entry; ties in time keep the order of the files' names and of their lines."""

    stamp: str
    name: str
    number: int
    text: str

    def is_at_least(self, level: str) -> bool:
        """Lines without a level (watchdog logs) are always shown."""
        words = self.text.split(" ", 3)
        own = words[2] if len(words) > 2 else ""
        return own not in _LEVELS or _LEVELS.index(own) >= _LEVELS.index(level)


def entries(name: str, lines: Iterator[str]) -> Iterator[Entry]:
    """Joins continuation lines to their entry. What stands before the first stamp comes first."""
    stamp, text, number = "", "", 0
    for line in lines:
        match = _STAMP.match(line)
        if match and text:
            yield Entry(stamp, name, number, text)
            text = ""
        if match:
            stamp, number = match.group(1), number + 1
        text += line if line.endswith("\n") else line + "\n"
    if text:
        yield Entry(stamp, name, number, text)


def log_files(directory: Path, process: str) -> list[Path]:
    """Logs and watchdog logs, each with its older part first."""
    files = [path for path in directory.glob("*.log*") if path.name.startswith(process)]
    return sorted(files, key=lambda path: (path.name.removesuffix(".1"), not path.name.endswith(".1")))


def merged(directory: Path, process: str = "", level: str = "DEBUG") -> Iterator[Entry]:
    """All entries of all files in the order of time."""
    streams = []
    for path in log_files(directory, process):
        name = path.name if path.name.endswith("watchdog.log") else ""
        streams.append(entries(name, iter(path.read_text("utf-8", "replace").splitlines(keepends=True))))
    return (entry for entry in heapq.merge(*streams) if entry.is_at_least(level))


def show(entry: Entry, out: TextIO) -> None:
    out.write(f"[{entry.name}] {entry.text}" if entry.name else entry.text)


def follow(directory: Path, process: str, level: str, out: TextIO) -> None:
    """Shows what is appended from now on; entries of one poll are in the order of time. Runs until interrupted."""
    offsets = {path: path.stat().st_size for path in log_files(directory, process)}
    while True:
        time.sleep(_POLL_S)
        fresh: list[Entry] = []
        for path in log_files(directory, process):
            if path.name.endswith(".1"):
                continue
            size = path.stat().st_size
            start = offsets.get(path, 0)
            offsets[path] = size
            if size == start:
                continue
            with path.open("rb") as file:
                file.seek(start if size > start else 0)  # smaller: a new file was begun
                text = file.read().decode("utf-8", "replace")
            name = path.name if path.name.endswith("watchdog.log") else ""
            fresh += entries(name, iter(text.splitlines(keepends=True)))
        for entry in sorted(fresh):
            if entry.is_at_least(level):
                show(entry, out)
        out.flush()


def main(argv: Sequence[str], out: TextIO = sys.stdout) -> int:
    parser = argparse.ArgumentParser(prog="nanoserve logs", description="the logs of all processes, merged by time")
    parser.add_argument("directory", type=Path, help="the --log-dir of the server")
    parser.add_argument(
        "--process", default="", metavar="NAME", help="only those whose name begins so: engine, detok-0, ..."
    )
    parser.add_argument(
        "--level", default="debug", choices=[level.lower() for level in _LEVELS], help="and above; watchdog logs always"
    )
    parser.add_argument("-n", "--lines", type=int, default=0, metavar="N", help="only the last N entries")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what is written from now on")
    options = parser.parse_args(argv)
    if not options.directory.is_dir():
        sys.stderr.write(f"nanoserve logs: {options.directory}: no such directory\n")
        return 1
    found = list(merged(options.directory, options.process, options.level.upper()))
    for entry in found[-options.lines :] if options.lines else found:
        show(entry, out)
    out.flush()
    if options.follow:
        try:
            follow(options.directory, options.process, options.level.upper(), out)
        except KeyboardInterrupt:
            return 0
    return 0
