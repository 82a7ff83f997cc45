"""Downloads against a small stand-in of the hub on this machine: progress, resume, later starts, one-line errors."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from nanoserve.config import ModelConfig, ServerConfig
from nanoserve.hub.resolve import prepare
from tests.gguf_samples import write_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COMMIT = "0123456789abcdef0123456789abcdef01234567"

PROGRAM = """
import json, sys
from nanoserve.config import *
from nanoserve.errors import StartupError
from nanoserve.hub.resolve import find_prepared, prepare
from nanoserve.hub.model_files import read_model_files
options = json.loads(sys.argv[1])
config = ServerConfig(model=ModelConfig(**options))
seen = []
before = find_prepared(config)
try:
    path = prepare(config, lambda stage, part: seen.append((stage, part)))
    result = {"path": str(path), "names": sorted(item.name for item in path.iterdir())}
except StartupError as exc:
    result = {"error": str(exc)}
after = find_prepared(config)
print(json.dumps(result | {"before": before and str(before), "after": after and str(after), "seen": seen}))
"""


class Hub(ThreadingHTTPServer):
    """Speaks the few routes of the hub that a snapshot needs; `files` is the one repository's content."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.files = files
        self.fetched: list[str] = []
        self.fail: set[str] = set()


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/org/tiny/revision/main"):
            return self.reply(json.dumps({"id": "org/tiny", "sha": COMMIT, "siblings": []}).encode())
        if path.startswith(f"/api/models/org/tiny/tree/{COMMIT}"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.files.items()
            ]
            return self.reply(json.dumps(entries).encode())
        prefix = f"/org/tiny/resolve/{COMMIT}/"
        name = path.removeprefix(prefix)
        if path.startswith(prefix) and name in self.server.files:
            if self.command == "GET":
                self.server.fetched.append(name)
                if name in self.server.fail:
                    return self.reply(b"", 500)
            return self.reply(self.server.files[name], etag=hashlib.sha1(self.server.files[name]).hexdigest())
        code = {"X-Error-Code": "RevisionNotFound" if "/revision/" in path and "org/tiny" in path else "RepoNotFound"}
        return self.reply(b'{"error": "not found"}', 404, extra=code)

    def reply(self, body: bytes, status: int = 200, etag: str = "", extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        for key, value in (extra or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    settings = ModelConfig(model=str(write_gguf(tmp_path / "m.gguf")), cache_dir=str(tmp_path / "made"))
    directory = prepare(ServerConfig(model=settings), lambda stage, part: None)
    files = {item.name: item.read_bytes() for item in directory.iterdir() if item.name != "source.json"}
    files |= {"README.md": b"x", "onnx/model.onnx": b"x", "original/model.safetensors": b"x", "pytorch_model.bin": b"x"}
    server = Hub(files)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(tmp_path: Path, endpoint: str, environment: dict[str, str] | None = None, **options: str) -> dict[str, Any]:
    """A fresh process, since huggingface_hub reads its environment when it is imported."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    variables = clean | {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home")} | (environment or {})
    options = {"model": "org/tiny", "cache_dir": str(tmp_path / "cache")} | options
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(options)], env=variables, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_download_then_start_without_the_hub(tmp_path: Path, hub: Hub) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    first = ask(tmp_path, endpoint)
    assert first["before"] is None
    assert first["names"] == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                              "tokenizer_config.json"]  # fmt: skip
    assert first["after"] == first["path"]
    parts = [part for stage, part in first["seen"] if stage == "downloading model"]
    assert parts == sorted(parts) and parts[-1] == 1.0
    assert set(hub.fetched) == set(first["names"])  # and none of the other forms of the weights

    hub.fetched.clear()
    second = ask(tmp_path, "http://127.0.0.1:9", {"HF_HUB_OFFLINE": "1"})
    assert (second["before"], second["seen"]) == (first["path"], [])
    assert hub.fetched == []


def test_a_download_cut_short_goes_on(tmp_path: Path, hub: Hub) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    hub.fail.add("model.safetensors")
    broken = ask(tmp_path, endpoint)
    assert "cannot download org/tiny" in broken["error"] and "\n" not in broken["error"]
    assert broken["after"] is None
    hub.fail.clear()
    hub.fetched.clear()
    again = ask(tmp_path, endpoint)
    assert again["after"] == again["path"]
    assert "model.safetensors" in hub.fetched and "tokenizer.json" not in hub.fetched


def test_a_tokenizer_of_the_hub_brings_no_weights(tmp_path: Path, hub: Hub) -> None:
    found = ask(tmp_path, f"http://127.0.0.1:{hub.server_port}", model="sim", tokenizer="org/tiny")
    assert "tokenizer.json" in found["names"] and "model.safetensors" not in found["names"]
    assert "model.safetensors" not in hub.fetched


def test_errors_are_one_line(tmp_path: Path, hub: Hub) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    answers = {
        "no model org/none on the hub": ask(tmp_path, endpoint, model="org/none"),
        "has no revision 'v9'": ask(tmp_path, endpoint, revision="v9"),
        "the hub cannot be reached": ask(tmp_path, "http://127.0.0.1:9"),
        "HF_HUB_OFFLINE is set": ask(tmp_path, endpoint, {"HF_HUB_OFFLINE": "1"}),
    }
    for words, answer in answers.items():
        assert words in answer["error"]
        assert "\n" not in answer["error"]
        assert answer["after"] is None
