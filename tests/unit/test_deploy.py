"""The container files say what the server needs, and agree with each other and with the configuration."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanoserve.cli import load_config

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
COMPOSE_FILES = ["docker-compose.yml", "docker-compose.gpu.yml"]


def service(name: str = "docker-compose.yml") -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())["services"]["nanoserve"]


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)s", text)
    assert match is not None
    return float(match.group(1))


def arguments(command: list[str]) -> list[str]:
    assert command[:3] == ["python", "-m", "nanoserve.launch_server"]
    return [word.replace("/app/", f"{REPOSITORY}/") for word in command[3:]]


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_the_commands_flags_exist(name: str) -> None:
    config = load_config(arguments(service(name)["command"]), {})
    assert (config.api.host, config.api.port) == ("0.0.0.0", 8000)
    assert config.obs.log_dir == "/var/log/nanoserve"


@pytest.mark.parametrize("words", re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE))
def test_the_images_commands_flags_exist(words: str) -> None:
    assert load_config(arguments(yaml.safe_load(words)), {}).api.host == "0.0.0.0"


@pytest.mark.parametrize("name", COMPOSE_FILES)
def test_the_runtime_waits_longer_than_the_drain(name: str) -> None:
    drain = load_config(arguments(service(name)["command"]), {}).api.drain_timeout
    assert seconds(service()["stop_grace_period"]) > drain + 10


def test_the_container_is_locked_down() -> None:
    parts = service()
    assert parts["init"] is True and parts["read_only"] is True
    assert parts["user"].split(":")[0] not in ("0", "root")
    assert parts["cap_drop"] == ["ALL"]
    assert parts["ports"][0].endswith("127.0.0.1:8000}:8000")
    mounts = {volume.split(":")[1] for volume in parts["volumes"]}
    assert mounts == {"/var/cache/nanoserve", "/var/log/nanoserve"}
    assert {mount.split(":")[0] for mount in parts["tmpfs"]} == {"/tmp", parts["environment"]["XDG_RUNTIME_DIR"]}


def test_the_health_check_gives_the_start_its_time() -> None:
    check = service()["healthcheck"]
    assert check["test"][:4] == ["CMD", "python", "-m", "nanoserve.healthcheck"]
    assert "/ready" in " ".join(check["test"])
    assert seconds(check["start_period"]) >= 120
    assert seconds(check["timeout"]) > float(check["test"][check["test"].index("--timeout") + 1])


def test_both_images_are_pinned_and_not_root() -> None:
    stages = dict(re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE))
    assert set(stages.values()) >= {"cpu", "cuda"}
    for target in ("cpu", "cuda"):
        body = DOCKERFILE.split(f" AS {target}\n")[1].split("\nFROM ")[0]
        assert "--constraint constraints.txt" in body
        assert body.index("USER nanoserve") < body.index("CMD ")
        assert "COPY nanoserve" in body and "COPY configs" in body
    assert "--torch-backend=cpu torch" in DOCKERFILE
    assert service()["build"]["target"] == "cpu"
    assert service("docker-compose.gpu.yml")["build"]["target"] == "cuda"


def test_the_build_context_holds_what_the_image_copies() -> None:
    kept = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for word in line.split()}
    assert copied <= kept
    assert all((REPOSITORY / name).exists() for name in copied)


@pytest.mark.parametrize("role", ["api", "engine", "detok"])
def test_one_container_per_process_runs_its_role_in_the_shared_directory(role: str) -> None:
    parts = yaml.safe_load((DEPLOY / "docker-compose.roles.yml").read_text())["services"][role]
    environment = {name: value.replace("/app/", f"{REPOSITORY}/") for name, value in parts["environment"].items()}
    config = load_config(arguments(parts["command"]), environment | {"NANOSERVE_MODEL": "sim"})
    assert config.processes.role == role
    assert any(config.processes.run_dir.startswith(volume.split(":")[1]) for volume in parts["volumes"])
    assert parts["restart"] == "always" and parts["read_only"] is True
    if role == "api":
        assert set(parts["depends_on"]) == {"engine", "detok"}
        assert seconds(parts["stop_grace_period"]) > config.api.drain_timeout + 10


def test_compose_accepts_the_files() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("no docker compose here")
    for files in (COMPOSE_FILES[:1], COMPOSE_FILES, ["docker-compose.roles.yml"]):
        flags = [word for name in files for word in ("-f", str(DEPLOY / name))]
        done = subprocess.run(
            [docker, "compose", *flags, "config", "--quiet"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr


def test_ci_script_is_valid_shell() -> None:
    script = REPOSITORY / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
    assert "set -euo pipefail" in script.read_text()
