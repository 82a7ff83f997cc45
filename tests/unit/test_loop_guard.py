"""The guard of event loops itself: it finds what waits and what computes for long, and nothing else."""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.loop_guard import LoopGuard, guarded_loop


def handler(body: str) -> Callable[[Path], Awaitable[Any]]:
    """A coroutine function that the guard takes for one of ours."""
    names: dict[str, Any] = {}
    source = "import asyncio, threading, time\nfrom concurrent.futures import Future\nasync def work(file):\n"
    exec(compile(source + textwrap.indent(body, "    "), "/nanoserve/api/work.py", "exec"), names)
    work: Callable[[Path], Awaitable[Any]] = names["work"]
    return work


async def watched(work: Callable[[Path], Awaitable[Any]], file: Path) -> LoopGuard:
    with guarded_loop() as guard:
        await asyncio.create_task(work(file))  # type: ignore[arg-type]
        found, guard.found = guard.found, []
    guard.found = found
    return guard


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "file"
    made.write_text("x")
    return made


@pytest.mark.rule(22)
@pytest.mark.parametrize(
    "body",
    [
        "time.sleep(0.1)",
        "open(file).close()",
        "file.read_text()",
        "import subprocess; subprocess.run(['true'])",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "threading.Event().wait(0.1)",
        "try: Future().result(0.2)\nexcept TimeoutError: pass",
        "began = time.thread_time()\nwhile time.thread_time() - began < 0.6: pass",
    ],
)
async def test_what_holds_up_the_loop_is_found(file: Path, body: str) -> None:
    guard = await watched(handler(body), file)
    assert guard.found and "work" in guard.found[0]


@pytest.mark.parametrize(
    "body",
    [
        "await asyncio.sleep(0.2)",
        "await asyncio.to_thread(time.sleep, 0.2)",
        "await asyncio.to_thread(file.read_text)",
        "sum(range(10_000))",
    ],
)
async def test_what_waits_elsewhere_is_not(file: Path, body: str) -> None:
    assert (await watched(handler(body), file)).found == []


async def test_a_finding_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="waited"), guarded_loop():
        await asyncio.create_task(handler("time.sleep(0.1)")(tmp_path))  # type: ignore[arg-type]
