"""schemathesis against the running server's own /openapi.json: no 5xx, no answer outside the schema."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import Server

pytestmark = pytest.mark.slow

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
NUM_EXAMPLES = 25  # of each operation


@pytest.mark.timeout(300)
def test_the_server_does_what_its_schema_says(sim_server: Server, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{sim_server.base_url}/openapi.json"]
    # /health_generate waits its turn behind everything that the others have asked for; nothing gets on after a pause
    bounds = ["--max-examples", str(NUM_EXAMPLES), "--seed", "1", "--request-timeout", "30"]
    scope = ["--phases", "fuzzing", "--checks", CHECKS]
    scope += ["--exclude-path", "/health_generate", "--exclude-path", "/pause_generation"]
    run = subprocess.run([*command, *bounds, *scope], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout[-4000:]
    assert sim_server.get("/health")[0] == 200
    status, answer = sim_server.post("/v1/completions", {"prompt": "Good day", "max_tokens": 2})
    assert status == 200 and answer["choices"][0]["text"] == "Good day"
