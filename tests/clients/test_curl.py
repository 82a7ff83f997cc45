"""curl as people type it: streams that come piece by piece, HTTP/1.0, HEAD, OPTIONS, wrong paths, bodies in chunks."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import pytest

from tests.e2e.harness import Server
from tests.forced import YES, force
from tests.sse_grammar import check_error, read_stream

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")]

COMPLETIONS = "/v1/completions"


def curl(*args: str, stdin: bytes = b"") -> bytes:
    done = subprocess.run(["curl", "-sS", "--max-time", "60", *args], input=stdin, capture_output=True, timeout=70)
    assert done.returncode == 0, done.stderr
    return done.stdout


def post(server: Server, body: Any, *args: str, path: str = COMPLETIONS) -> bytes:
    """The answer, its status in the last line."""
    header = ("-H", "Content-Type: application/json")
    url = server.base_url + path
    return curl("-N", *header, "-w", "\n%{http_code}", *args, "-d", "@-", url, stdin=json.dumps(body).encode())


def go(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Go", "max_tokens": 5, "temperature": 0, **force(YES), **fields}


def test_unary_and_streamed(server: Server) -> None:
    answer, status = post(server, go()).rsplit(b"\n", 1)
    assert status == b"200" and json.loads(answer)["choices"][0]["text"] == " yes" * 5
    answer, status = post(server, go(stream=True)).rsplit(b"\n", 1)
    assert status == b"200" and read_stream(answer, chat=False).choices[0].text == " yes" * 5


@pytest.mark.rule(72)
def test_http_1_0_gets_the_same_bytes_without_chunks(server: Server) -> None:
    answer, status = post(server, go(stream=True), "--http1.0").rsplit(b"\n", 1)
    assert status == b"200" and read_stream(answer, chat=False).choices[0].text == " yes" * 5
    raw = post(server, go(stream=True), "--http1.0", "--raw", "-i")
    assert b"chunked" not in raw.split(b"\r\n\r\n", 1)[0].lower()


def test_a_body_in_chunks_and_an_expectation(server: Server) -> None:
    for header in ("Transfer-Encoding: chunked", "Expect: 100-continue"):
        assert post(server, go(), "-H", header).endswith(b"200")


@pytest.mark.rule(72)
def test_compression_is_not_for_streams(server: Server) -> None:
    raw = post(server, go(stream=True), "-i", "-H", "Accept-Encoding: gzip, br, zstd")
    head, body = raw.split(b"\r\n\r\n", 1)
    assert b"content-encoding" not in head.lower() and read_stream(body.rsplit(b"\n", 1)[0], chat=False)


@pytest.mark.rule(17)
@pytest.mark.parametrize(
    ("args", "path", "status"),
    [
        (["-I"], "/health", 200),
        (["-I"], "/v1/models", 200),
        (["-X", "OPTIONS"], COMPLETIONS, 204),
        (["-X", "OPTIONS"], "/nothing", 404),
        ([], "/nothing", 404),
        ([], "/v1/embeddings", 404),
        ([], COMPLETIONS, 405),
        (["-X", "DELETE"], "/v1/models", 405),
        (["-X", "BREW"], COMPLETIONS, 400),
        (["-X", "POST"], COMPLETIONS, 400),
    ],
)
def test_methods_and_paths(server: Server, args: list[str], path: str, status: int) -> None:
    out = curl(*args, "-w", "\n%{http_code}", server.base_url + path)
    body, code = out.rsplit(b"\n", 1)
    assert int(code) == status
    if status >= 400:
        check_error(json.loads(body))


def test_the_first_words_of_the_readme_work(server: Server) -> None:
    """The command that the server prints when it is ready."""
    line = next(line for line in server.output.splitlines() if line.strip().startswith("curl -N "))
    out = subprocess.run(["bash", "-c", line.strip() + " -sS"], capture_output=True, timeout=110, check=True).stdout
    assert read_stream(out, chat=True).choices[0].text
