"""The clients are imported when a test needs them: their imports take seconds, and some warn."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.harness import Server, wait_until

# litellm and the data set libraries would ask the network for tables at import; nothing here needs one.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("LANGSMITH_TRACING", "false")


def library(name: str) -> Any:
    """A client library; what its import warns of is not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture
def server(smollm2_server: Server) -> Iterator[Server]:
    """The real model in float32. After every test nothing of it is left in the engine."""
    yield smollm2_server
    idle = "nanoserve_num_requests_running 0.0"
    wait_until(lambda: idle in smollm2_server.get("/metrics")[1], 10.0, "the engine still runs a request")
