"""An api process for the tests of it, and the guard of its event loop under which each of them runs."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.integration.api_ring import Api, loaded_api
from tests.loop_guard import guarded_loop


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    is_of_the_api = request.module.__name__.rpartition(".")[2].startswith("test_api_")
    with guarded_loop() if is_of_the_api and inspect.iscoroutinefunction(request.function) else nullcontext():
        yield


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    """One that is ready, with the default configuration; modules that need another have a fixture of their own."""
    async with loaded_api(tmp_path) as running:
        yield running
