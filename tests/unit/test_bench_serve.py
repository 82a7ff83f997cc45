"""bench serve and peers: what is wrong with the servers or flags they are given is said at once, in one line."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from nanoserve.bench import peers, serve


class _Handler(BaseHTTPRequestHandler):
    """Answers as the path's first part says: /503/v1/models, /page/v1/models, /list/v1/models."""

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        bodies = {"page": ("text/html", b"<p>hello"), "list": ("application/json", b"[]")}
        content_type, body = bodies.get(kind, ("text/plain", b"no"))
        self.send_response(503 if kind == "503" else 200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def other_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # between two looks at `shutdown`
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _run(monkeypatch: pytest.MonkeyPatch, *flags: str) -> object:
    monkeypatch.setattr(sys, "argv", ["serve", *flags, "--workload", "W1"])
    with pytest.raises(SystemExit) as ended:
        serve.main()
    return ended.value.code


@pytest.mark.parametrize("model", [[], ["--model", "x"]])
def test_where_no_server_is(monkeypatch: pytest.MonkeyPatch, model: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = str(_run(monkeypatch, "--server", f"a=http://127.0.0.1:{port}", *model))
    assert code.startswith(f"bench serve: no server at http://127.0.0.1:{port}: ") and "\n" not in code


@pytest.mark.parametrize(
    ("kind", "words"),
    [("503", "answered 503"), ("page", "does not answer as"), ("list", "does not answer as an OpenAI server's does")],
)
def test_where_something_else_answers(
    monkeypatch: pytest.MonkeyPatch, other_server: str, kind: str, words: str
) -> None:
    code = str(_run(monkeypatch, "--server", f"a={other_server}/{kind}"))
    assert code.startswith("bench serve: ") and words in code and "\n" not in code


@pytest.mark.parametrize("given", ["http://127.0.0.1:8000", "a", "a=", "=http://127.0.0.1:8000", "a=127.0.0.1:8000"])
def test_a_server_without_a_name_or_a_url(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given: str
) -> None:
    assert _run(monkeypatch, "--server", given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{given!r} is not NAME=URL, such as nanoserve=http://127.0.0.1:8000")


def test_peers_notice_a_wrong_flag_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "peers"
    monkeypatch.setattr(sys, "argv", ["peers", "--root", str(root), "--", "--no-such-flag", "1"])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert ended.value.code == 2 and "unrecognized arguments: --no-such-flag" in capsys.readouterr().err
    assert not root.exists()
