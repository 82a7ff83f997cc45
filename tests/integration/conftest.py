"""Every test of the api process runs under the guard of its event loop."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from tests.loop_guard import guarded_loop


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    is_of_the_api = request.module.__name__.rpartition(".")[2].startswith("test_api_")
    with guarded_loop() if is_of_the_api and inspect.iscoroutinefunction(request.function) else nullcontext():
        yield
