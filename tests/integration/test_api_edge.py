"""The edge: keys, CORS, header limits and times, broken HTTP, old HTTP."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from nanoserve.api.access import Access
from nanoserve.api.edge import tls_context
from nanoserve.config import ApiConfig, ServerConfig
from nanoserve.errors import StartupError
from nanoserve.ipc.columns import pack_ids
from tests.integration.api_ring import loaded_api, running_api
from tests.integration.raw_http import raw
from tests.sse_grammar import read_stream

COMPLETIONS = "/v1/completions"


def config(**fields: Any) -> ServerConfig:
    return ServerConfig(api=ApiConfig(**fields))


@pytest.mark.rule(19)
async def test_keys_guard_all_but_probes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nfrom-file\n\n")
    async with loaded_api(tmp_path / "m", config(api_key=("one", "two"), api_key_file=str(keys))) as api:
        for path in ("/v1/models", "/server_info", "/nothing"):
            async with api.http.get(api.url + path) as response:
                assert response.status == 401 and response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["error_code"] == "invalid_api_key"
        for path in ("/health", "/ready", "/metrics", "/ping"):
            assert (await api.get(path))[0] == 200
        body = {"prompt": "x", "max_tokens": 1}
        for headers in ({"Authorization": "Bearer two"}, {"X_Api_Key": "one"}, {"Authorization": "bearer from-file"}):
            assert (await api.post(COMPLETIONS, body, **headers))[0] == 200
        for headers in ({"Authorization": "Bearer on"}, {"Authorization": "Basic one"}, {"X_Api_Key": ""}):
            assert (await api.post(COMPLETIONS, body, **headers))[0] == 401


async def test_admin_paths_have_their_own_key(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, config(api_key=("user",), admin_api_key=("root",))) as api:
        for path in ("/flush_cache", "/start_profile", "/configure_logging"):
            assert (await api.post(path, {}, Authorization="Bearer user"))[0] == 401
        assert (await api.post("/flush_cache", {}, Authorization="Bearer root"))[0] != 401
        assert (await api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, Authorization="Bearer root"))[0] == 200


@pytest.mark.rule(19)
async def test_pages_of_other_origins_cannot_act_on_the_server(tmp_path: Path) -> None:
    """A browser asks nobody before it posts without a body or a type."""
    foreign, named = {"Origin": "https://b.example"}, {"Origin": "https://a.example"}
    async with loaded_api(tmp_path, config(cors_allow_origins=("https://a.example",))) as api:
        for headers, status in ((foreign, 403), ({"Origin": "null"}, 403), (named, 200), ({"Origin": api.url}, 200)):
            assert (await api.post("/pause_generation", b"", **headers))[0] == status
            await api.ring.until(lambda paused=status == 200: api.ring.paused is paused)
            assert (await api.post("/continue_generation", {}))[0] == 200
            await api.ring.until(lambda: not api.ring.paused)
        assert (await api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}, **foreign))[0] == 200


async def test_cors_is_off_by_default_and_answers_the_named_origins(tmp_path: Path) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with running_api() as api, api.http.options(api.url + COMPLETIONS, headers=asked) as response:
        assert response.status == 204 and "Access-Control-Allow-Origin" not in response.headers
        assert "POST" in response.headers["Allow"]
    async with running_api(config(cors_allow_origins=("https://a.example",))) as api:
        async with api.http.options(api.url + COMPLETIONS, headers=asked) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
        async with api.http.get(api.url + "/health", headers={"Origin": "https://a.example"}) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
        async with api.http.get(api.url + "/health", headers={"Origin": "https://b.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


@pytest.mark.rule(17)
async def test_head_and_options_do_not_fail() -> None:
    async with running_api() as api:
        async with api.http.head(api.url + "/health") as response:
            assert response.status == 200
        async with api.http.options(api.url + "/nothing") as response:
            assert response.status == 404


LONG = b"a" * (ApiConfig().max_header_bytes + 1)


@pytest.mark.rule(8, 13)
@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nLong: " + LONG + b"\r\n\r\n", 431),
        (b"GET /" + LONG + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * ApiConfig().max_headers + b"\r\n", 431),
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nContent-Length: -5\r\n\r\n", 400),
        (b"\x16\x03\x01\x00\xa5\x01\x00", 400),
    ],
)
async def test_broken_http_gets_the_envelope_and_is_closed(data: bytes, status: int) -> None:
    async with running_api() as api:
        head, _, body = (await raw(api, data)).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 %d" % status, b"HTTP/1.0 %d" % status)), head
        assert json.loads(body)["error"]["code"] == status


@pytest.mark.rule(8)
@pytest.mark.parametrize(("num_bytes", "num_headers"), [(1024, 8), (40_000, 300)])  # aiohttp's own: 8190 and 128
async def test_header_limits_are_those_of_the_configuration(num_bytes: int, num_headers: int) -> None:
    """What a limit just allows is served, one more is not."""
    start = b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    async with running_api(config(max_header_bytes=num_bytes, max_headers=num_headers)) as api:
        for over, status in ((0, 200), (1, 431)):
            long_value = start % b"/health" + b"Long: " + b"a" * (num_bytes - len("Long") + over * len("Long+"))
            long_path = start % (b"/health?" + b"a" * (num_bytes - len("/health?") + over))
            many = start % b"/health" + b"\r\n".join([b"A: b"] * (num_headers - 2 + over))
            for head in (long_value, long_path.removesuffix(b"\r\n"), many):
                answer = await raw(api, head + b"\r\n\r\n")
                assert int(answer.split()[1]) == status, (over, head[:80], answer[:200])


@pytest.mark.rule(8, 14)
@pytest.mark.parametrize(("encoding", "status"), [(b"gzip", 400), (b"deflate", 400), (b"rot13", 415)])
async def test_broken_content_encoding_is_a_4xx_and_no_log_line(
    encoding: bytes, status: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with loaded_api(tmp_path) as api:
        body = b"not gzip at all"
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        head += b"Content-Encoding: %s\r\nContent-Length: %d\r\n\r\n" % (encoding, len(body))
        answer = await raw(api, head + body)
        assert answer.startswith(b"HTTP/1.1 %d" % status) and b'"error"' in answer
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.rule(8)
async def test_slow_headers_and_slow_bodies_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanoserve.api.edge._LINGER_S", 0.05)  # the rest of the body never comes
    async with loaded_api(tmp_path, config(header_timeout=0.2, body_timeout=0.2)) as api:
        assert (await raw(api, b"GET /health HT")).startswith(b"HTTP/1.1 408")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nConnection: close\r\n\r\n{"
        assert (await raw(api, head)).startswith(b"HTTP/1.1 408")


@pytest.mark.rule(8)
async def test_connections_are_bounded() -> None:
    async with running_api(config(max_connections=3)) as api:
        port = urlsplit(api.url).port
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        assert (await raw(api, b"")).startswith(b"HTTP/1.1 503")
        for _, writer in opened:
            writer.close()


@pytest.mark.rule(72)
@pytest.mark.parametrize("asked", ["", "Connection: keep-alive\r\n"])  # nothing else can end such a body
async def test_http_1_0_stream_is_not_chunked_and_ends_by_close(tmp_path: Path, asked: str) -> None:
    async with loaded_api(tmp_path) as api:
        body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.0\r\nContent-Type: application/json\r\n{asked}"
        answer = await raw(api, f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        headers, _, data = answer.partition(b"\r\n\r\n")
        assert b"chunked" not in headers.lower() and b"keep-alive" not in headers.lower()
        assert read_stream(data, chat=False).choices[0].text == "aa"


@pytest.mark.rule(16)
async def test_keep_alive_connection_survives_a_stream(tmp_path: Path) -> None:
    async with loaded_api(tmp_path) as api:
        for _ in range(3):
            await api.events(COMPLETIONS, {"prompt": "x", "max_tokens": 2})
        assert len(api.http.connector._conns) == 1  # type: ignore[union-attr]


async def test_a_key_file_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        Access(replace(ApiConfig(), api_key_file=str(tmp_path / "missing")))


@pytest.mark.rule(75)
async def test_a_client_that_never_reads_is_cut_at_the_cap_and_its_text_merges(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, config(stream_buffer_bytes=100_000)) as api:
        api.ring.script = lambda add: None
        body = json.dumps({"prompt": "x", "max_tokens": 50, "stream": True}).encode()
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.setblocking(False)
        await asyncio.get_running_loop().sock_connect(deaf, ("127.0.0.1", urlsplit(api.url).port))
        deaf.send(head % len(body) + body)
        add = await api.ring.next_added()
        for step in range(400):  # the kernel's buffers take some megabytes first
            api.ring.send(
                request_ids=[add.request_id],
                deltas=["y" * 50_000],
                char_offset=[step * 50_000],
                first_index=[step],
                num_tokens=[1],
                token_ids=pack_ids([121]),
            )
            await asyncio.sleep(0.005)
            if api.ring.aborted:
                break
        await api.ring.until(lambda: api.ring.aborted)
        assert api.ring.aborted[0].request_ids == [add.request_id]
        assert api.process.context.metrics.slow_readers_cut == 1
        deaf.close()
        api.ring.script = api.ring.finish_at_once
        assert (await api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1}))[0] == 200


async def test_fair_scheduling_tells_the_engine_whose_request_it_is(tmp_path: Path) -> None:
    fair = replace(config(api_key=("a", "b")), scheduler=replace(ServerConfig().scheduler, scheduling_policy="fair"))
    async with loaded_api(tmp_path, fair) as api:
        body = {"prompt": "x", "max_tokens": 9}
        for _ in range(3):
            await api.post(COMPLETIONS, {**body, "stream": False}, Authorization="Bearer a")
        api.ring.script = lambda add: None
        waiting = [asyncio.create_task(api.post(COMPLETIONS, body, Authorization="Bearer a")) for _ in range(3)]
        await api.ring.until(lambda: len(api.ring.added) == 7)
        waiting.append(asyncio.create_task(api.post(COMPLETIONS, body, Authorization="Bearer b")))
        await api.ring.until(lambda: len(api.ring.added) == 8)
        *flood, modest = [add.share_key for add in api.ring.added[4:]]
        assert len(set(flood)) == 1 and modest not in flood
        for add in api.ring.added[4:]:
            api.ring.finish_at_once(add)
        await asyncio.gather(*waiting)


@pytest.mark.rule(71)
async def test_a_request_that_no_engine_takes_is_refused_in_time(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, config(accept_timeout=0.3)) as api:
        api.ring.script = lambda add: None
        api.ring.auto_accept = False
        for stream in (False, True):
            async with api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": stream}) as response:
                assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
        api.ring.auto_accept = True
        waiting = asyncio.create_task(api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}))
        await api.ring.until(lambda: len(api.ring.added) == 4)
        await asyncio.sleep(0.5)
        assert not waiting.done()  # accepted: now it may wait as long as it takes
        api.ring.finish_at_once(api.ring.added[-1])
        assert (await waiting)[0] == 200


async def test_https_with_a_certificate(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    arguments = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate, "-days", "2"]
    subprocess.run(["openssl", *arguments, "-subj", "/CN=localhost"], check=True, capture_output=True)
    async with running_api(config(ssl_certfile=str(certificate), ssl_keyfile=str(key))) as api:
        trust = ssl.create_default_context(cafile=str(certificate))
        trust.check_hostname = False
        async with api.http.get(api.url.replace("http:", "https:") + "/health", ssl=trust) as response:
            assert response.status == 200


def test_a_certificate_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="certificate"):
        tls_context(ApiConfig(ssl_certfile=str(tmp_path / "none.pem")))
    assert tls_context(ApiConfig()) is None
