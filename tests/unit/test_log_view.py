"""Logs of several processes as one."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from nanoserve.__main__ import main
from nanoserve.obs import log_view


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    (tmp_path / "api-0.log").write_text(
        "2025-01-01 10:00:00.100 INFO api-0 1 first\n2025-01-01 10:00:00.400 INFO api-0 1 fourth\n"
    )
    (tmp_path / "engine-0.log.1").write_text("2025-01-01 10:00:00.200 WARNING engine-0 2 second, from the older file\n")
    (tmp_path / "engine-0.log").write_text(
        "2025-01-01 10:00:00.300 ERROR engine-0 2 third\nTraceback\n  more\n"
        "2025-01-01 10:00:00.500 INFO engine-0 2 fifth\n"
    )
    (tmp_path / "engine-0.watchdog.log").write_text("2025-01-01 10:00:00 watching engine-0\nThread 0x1\n")
    return tmp_path


def shown(logs: Path, *args: str) -> list[str]:
    out = io.StringIO()
    assert log_view.main([str(logs), *args], out) == 0
    return out.getvalue().splitlines()


def test_lines_are_in_the_order_of_time_and_tracebacks_stay_with_their_line(logs: Path) -> None:
    lines = shown(logs)
    words = [line.split(" ", 5)[-1] if line.startswith("2025") else line for line in lines]
    assert words == [
        "[engine-0.watchdog.log] 2025-01-01 10:00:00 watching engine-0",
        "Thread 0x1",
        "first",
        "second, from the older file",
        "third",
        "Traceback",
        "  more",
        "fourth",
        "fifth",
    ]


def test_one_process_a_level_and_the_last_entries(logs: Path) -> None:
    assert not any("api-0" in line for line in shown(logs, "--process", "engine"))
    assert not any("INFO" in line for line in shown(logs, "--level", "warning"))
    assert len(shown(logs, "-n", "1")) == 1


def test_no_directory_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", "/does/not/exist"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_follow_shows_what_is_appended(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(["2025-01-01 10:00:01.000 INFO api-0 1 new\n", ""])

    def sleep(_: float) -> None:
        text = next(turns, None)
        if text is None:
            raise KeyboardInterrupt
        with (logs / "api-0.log").open("a") as file:
            file.write(text)

    monkeypatch.setattr(log_view.time, "sleep", sleep)
    assert [line.split()[-1] for line in shown(logs, "-n", "1", "-f")] == ["fifth", "new"]
