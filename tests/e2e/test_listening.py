"""Where the server listens: a Unix socket, and HTTPS."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from nanoserve.config import ApiConfig
from nanoserve.errors import StartupError
from nanoserve.listening import listen_unix, listening
from tests.conftest import StartServer
from tests.sse_grammar import read_stream

pytestmark = pytest.mark.slow


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(20)
        self.sock.connect(str(self._path))


def test_a_server_on_a_unix_socket(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    server = start_server("sim", "--uds", str(path))
    connection = UnixConnection(path)
    body = json.dumps({"prompt": "over a path", "max_tokens": 3, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    assert read_stream(connection.getresponse().read(), chat=False).choices[0].reason == "length"
    connection.close()
    assert f"--unix-socket {path} http://localhost" in server.output


def test_a_socket_left_over_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    listen_unix(str(path)).close()  # the file stays
    with listen_unix(str(path)), pytest.raises(StartupError, match="in use"):
        listen_unix(str(path))


def test_the_file_of_the_socket_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with listening(ApiConfig(uds=str(path))):
        assert path.is_socket()
    assert not path.exists()
    with listening(ApiConfig(uds=str(path))) as ours:
        path.unlink()
        other = listen_unix(str(path))  # another server has taken the place
        assert ours.fileno() >= 0
    assert path.is_socket()
    other.close()


def test_https_all_the_way(start_server: StartServer, tmp_path: Path) -> None:
    if shutil.which("openssl") is None or shutil.which("curl") is None:
        pytest.skip("needs openssl and curl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    arguments = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2"]
    name = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", *arguments, *name], check=True, capture_output=True)
    server = start_server("sim", "--ssl-certfile", str(certificate), "--ssl-keyfile", str(key))
    url = next(word for word in server.output.split() if word.startswith("https://"))
    got = subprocess.run(["curl", "-s", "--cacert", certificate, url + "/ready"], capture_output=True, check=True)
    assert json.loads(got.stdout)["status"] == "ready"
