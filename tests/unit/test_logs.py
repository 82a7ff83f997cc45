"""The log file: format, cap, full disk, native output."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path

from nanoserve.obs.logs import CappedFileHandler, LineFormatter, last_lines, log_file, watchdog_file


def record(message: str) -> logging.LogRecord:
    return logging.LogRecord("nanoserve.x", logging.INFO, "x.py", 1, message, None, None)


def test_a_line_has_time_level_process_pid_message() -> None:
    line = LineFormatter("engine-0").format(record("hello"))
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} INFO engine-0 {os.getpid()} hello", line)


def test_the_file_is_capped_and_one_older_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "p.log"
    handler = CappedFileHandler(path, max_bytes=1000)
    for number in range(200):
        handler.emit(record(f"line {number:04d} " + "x" * 50))
    handler.close()
    assert path.stat().st_size <= 1000
    assert (tmp_path / "p.log.1").stat().st_size <= 1000
    assert "line 0199" in path.read_text()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["p.log", "p.log.1"]


def test_a_full_disk_costs_lines_only() -> None:
    handler = CappedFileHandler(Path("/dev/full"))
    handler.emit(record("lost"))
    handler.emit(record("lost too"))
    handler.close()
    assert handler.lost_lines == 2


def test_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.log"
    path.write_text("".join(f"{number}\n" for number in range(100)))
    assert last_lines(path, 3) == ["97", "98", "99"]
    assert last_lines(tmp_path / "none") == []


def test_names() -> None:
    assert log_file(Path("d"), "api-0") == Path("d/api-0.log")
    assert watchdog_file(Path("d"), "api-0") == Path("d/api-0.watchdog.log")


def test_a_child_writes_native_output_and_warnings_to_its_file_and_its_lines_to_the_terminal(tmp_path: Path) -> None:
    code = """
import logging, os, sys, warnings
from pathlib import Path
from nanoserve.obs.logs import FILE_ONLY, setup_logging
setup_logging("detok-0", Path(sys.argv[1]), "info", child=True)
logging.getLogger("nanoserve.detok").info("our line")
logging.getLogger("nanoserve.detok").info("told by somebody else", extra=FILE_ONLY)
logging.getLogger("nanoserve.detok").debug("too small")
logging.getLogger("somebody.else").info("not ours")
warnings.warn("a warning")
os.write(2, b"native words\\n")
print("printed words")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    written = log_file(tmp_path, "detok-0").read_text()
    assert all(words in written for words in ("INFO detok-0", "our line", "native words", "printed words", "a warning"))
    assert "too small" not in written and "not ours" not in written
    assert "told by somebody else" in written and "told by somebody else" not in done.stderr
    assert "our line" in done.stderr and "native words" not in done.stderr
    assert done.stdout == ""
