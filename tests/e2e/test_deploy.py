"""The compose service's own command and health check, run as processes of this machine with the sim model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.test_deploy import REPOSITORY, service

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_the_services_command_becomes_healthy_and_stops_in_its_grace_period(tmp_path: Path) -> None:
    parts, port = service(), free_port()
    mounts = {volume.split(":")[1]: tmp_path / volume.split(":")[0] for volume in parts["volumes"]}

    def here(word: str) -> str:
        word = word.replace("/app/", f"{REPOSITORY}/").replace("8000", str(port))
        word = word.replace("0.0.0.0", "127.0.0.1")
        for inside, outside in mounts.items():
            word = word.replace(inside, str(outside))
        return sys.executable if word == "python" else word

    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    environment = {**os.environ, **parts["environment"], "NANOSERVE_MODEL": "sim", "XDG_RUNTIME_DIR": str(run_dir)}
    health = [here(word) for word in parts["healthcheck"]["test"][1:]]
    command = [here(word) for word in parts["command"]]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline = time.monotonic() + float(parts["healthcheck"]["start_period"].removesuffix("s"))
            codes = [1]
            while codes[-1] != 0 and time.monotonic() < deadline and server.poll() is None:
                codes.append(subprocess.run(health, capture_output=True, timeout=10, check=False).returncode)
            assert codes[-1] == 0
            logs = mounts["/var/log/nanoserve"]
            for name in ("api-0", "engine-0", "detok-0"):
                assert (logs / f"{name}.log").exists() and (logs / f"{name}.watchdog.log").exists()
            assert list(run_dir.iterdir())
            server.send_signal(signal.SIGTERM)
            assert server.wait(float(parts["stop_grace_period"].removesuffix("s"))) == 0
        finally:
            server.kill()
    assert not list(run_dir.iterdir())
    assert subprocess.run(health, capture_output=True, timeout=10, check=False).returncode == 1
