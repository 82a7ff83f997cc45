"""The health check that containers run: exit code 0 for 200, else 1, and never a hang."""

from __future__ import annotations

import ast
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from nanoserve.healthcheck import check, main


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
        self.wfile.write(b'{"status": "x"}')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # between two looks at `shutdown`
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_200_is_healthy_and_all_else_is_not(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", f"{url}/ready"]) == 0
    assert main(["--url", f"{url}/other"]) == 1
    assert "503" in capsys.readouterr().err


def test_the_path_defaults_to_ready(url: str) -> None:
    assert check(url, 2) == (True, '200 {"status": "x"}')


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    assert main(["--url", f"http://127.0.0.1:{port}/ready"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


def test_a_server_that_never_answers_is_not_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        healthy, _ = check(f"http://127.0.0.1:{sock.getsockname()[1]}/ready", 0.2)
    assert not healthy


def test_wrong_address() -> None:
    assert not check("ftp://x/", 1)[0]


def test_it_needs_the_standard_library_only() -> None:
    code = "import sys, nanoserve.healthcheck as h; print(sorted({n.split('.')[0] for n in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert not loaded & {"msgspec", "zmq", "aiohttp", "psutil", "yaml", "torch", "tokenizers"}


@pytest.mark.parametrize("kind", ["https", "http+unix", "https+unix"])
def test_https_and_unix_sockets(kind: str, tmp_path: Path) -> None:
    """A certificate that nobody signed is good enough on this machine."""
    family = socket.AF_UNIX if kind.endswith("unix") else socket.AF_INET
    place = str(tmp_path / "Upper.sock") if family == socket.AF_UNIX else ("127.0.0.1", 0)
    listener = socket.socket(family)
    listener.bind(place)
    listener.listen()
    if kind.startswith("https"):
        key, cert = str(tmp_path / "key"), str(tmp_path / "cert")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x",
             "-keyout", key, "-out", cert],
            check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)

    def answer() -> None:
        accepted, _ = listener.accept()
        with context.wrap_socket(accepted, server_side=True) if kind.startswith("https") else accepted as connection:
            asked = connection.recv(1000)
            status = b"200 OK" if asked.startswith(b"GET /ready ") else b"404 No"
            connection.sendall(b"HTTP/1.1 %s\r\nContent-Length: 2\r\n\r\nok" % status)

    thread = threading.Thread(target=answer)
    thread.start()
    is_unix = family == socket.AF_UNIX
    where = quote(str(place), safe="") if is_unix else f"127.0.0.1:{listener.getsockname()[1]}"
    assert check(f"{kind}://{where}/ready", 10) == (True, "200 ok")
    thread.join()
    listener.close()


@pytest.mark.parametrize("url", ["ftp://x/ready", "http:///ready", "http+tcp://x/ready", "nonsense"])
def test_other_addresses_are_one_line(url: str) -> None:
    assert not check(url, 1)[0]
