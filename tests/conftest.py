"""Servers for tests against real processes. The shared ones start once a session: starting costs, asking does not.

And what `make test-fast` leaves alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import Server

StartServer = Callable[..., Server]

_SLOW_MODULE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without the slow tests, what is slow as a whole is not even imported: that would take torch, and seconds."""
    is_left_out = config.option.markexpr == "not slow" and collection_path.match("test_*.py")
    return True if is_left_out and _SLOW_MODULE.search(collection_path.read_text(encoding="utf-8")) else None


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """`start_server("sim", "--drain-timeout", "1")` for a server of one's own; ready unless `wait=False`."""
    servers: list[Server] = []

    def start(*args: str, wait: bool = True, env: dict[str, str] | None = None) -> Server:
        server = Server(*args, log_dir=tmp_path / f"logs-{len(servers)}", env=env)
        servers.append(server)
        return server.wait_ready() if wait else server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def sim_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`--model sim` with the default tokenizer: the answer is the prompt's ids, over and over."""
    with Server("sim", "--max-num-seqs", "64", log_dir=tmp_path_factory.mktemp("sim-logs")) as server:
        yield server.wait_ready()


@pytest.fixture(scope="session")
def smollm2_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """SmolLM2-135M in float32."""
    # one thread: the clients of a test need the other cores, and steps that share a core with them are slow
    flags = "--dtype float32 --max-model-len 2048 --kv-cache-memory 512MiB --engine-threads 1"
    with Server("smollm2-135m", *flags.split(), log_dir=tmp_path_factory.mktemp("smollm2-logs")) as server:
        yield server.wait_ready(240.0)
