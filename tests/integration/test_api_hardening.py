"""What a hostile or unlucky client may try: each attack costs itself only, and is answered in the envelope."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from nanoserve.api.resume import EventLog
from nanoserve.config import ApiConfig, SchedulerConfig, ServerConfig
from nanoserve.errors import RequestError
from nanoserve.ipc.columns import pack_ids
from nanoserve.ipc.messages import AddRequest
from tests.integration.api_ring import Api, loaded_api
from tests.integration.event_reader import EventReader
from tests.integration.raw_http import raw

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


def config(**fields: object) -> ServerConfig:
    return ServerConfig(api=ApiConfig(**fields))  # type: ignore[arg-type]


# ---- bodies that are dear to read ------------------------------------------------------------------------


@pytest.mark.rule(12)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b'{"messages":[' + b"{}," * 3_000_000 + b"{}]}"),
        (CHAT, b'{"chat_template_kwargs":{"a":[' + b"[]," * 3_000_000 + b"[]]}}"),
        (COMPLETIONS, b'{"prompt":"x","stop":[' + b'"",' * 3_000_000 + b'""]}'),
        ("/tokenize", b'{"messages":[' + b"{}," * 3_000_000 + b"{}]}"),
    ],
)
async def test_a_body_of_millions_of_values_does_not_hold_up_the_loop(api: Api, path: str, body: bytes) -> None:
    """Rule 12: the number of values is bounded before they are built."""
    worst_s = 0.0

    async def watch() -> None:
        nonlocal worst_s
        while True:
            began_s = time.thread_time()
            await asyncio.sleep(0.01)
            worst_s = max(worst_s, time.thread_time() - began_s)

    watcher = asyncio.create_task(watch())
    status, answer = await api.post(path, body)
    watcher.cancel()
    assert status in (400, 413) and "too many values" in answer["error"]["message"]
    assert worst_s < 0.5  # CPU time of this thread: reading and counting alone


@pytest.mark.rule(12)
async def test_thousands_of_unknown_fields_are_refused(api: Api) -> None:
    body = b'{"prompt":"x",' + b",".join(b'"k%d":0' % number for number in range(5000)) + b"}"
    status, answer = await api.post(COMPLETIONS, body)
    assert status == 400 and "fields" in answer["error"]["message"]


@pytest.mark.rule(9)
async def test_deep_nesting_is_a_400_also_where_templates_walk_it(tmp_path: Path) -> None:
    """Rule 9."""
    template = "{{ messages | tojson }}{{ extra | tojson if extra is defined }}"
    hi = json.dumps(HI)
    async with loaded_api(tmp_path, template=template) as api:
        for depth in (1, 400, 900, 1200, 5000, 200_000):
            deep = "[" * depth + "]" * depth
            for body in (
                f'{{"messages":{hi},"chat_template_kwargs":{{"extra":{deep}}}}}',
                f'{{"messages":[{{"role":"user","content":"hi","tool_calls":{deep}}}]}}',
                f'{{"messages":{hi},"response_format":{deep}}}',
                f'{{"messages":[{{"role":"user","content":{deep}}}]}}',
            ):
                status, _ = await api.post(CHAT, body.encode())
                assert status in (200, 400), (depth, body[:80])


# ---- after the first byte --------------------------------------------------------------------------------


async def test_a_fault_after_the_first_byte_closes_the_connection_instead_of_writing_a_second_answer(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(add: AddRequest) -> None:
        api.ring.token(add.request_id, "a")

    api.ring.script = script
    payload = json.dumps({"prompt": "x", "stream": True, "max_tokens": 9}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(api.url).port)
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    writer.write(head % (COMPLETIONS.encode(), len(payload)) + payload)
    begun = await asyncio.wait_for(reader.readuntil(b"\n\n"), 10)
    assert begun.startswith(b"HTTP/1.1 200")

    def broken(*_: object, **__: object) -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr("nanoserve.api.event_writer.EventWriter.send", broken)
    api.ring.token(api.ring.added[-1].request_id, "b")
    rest = await asyncio.wait_for(reader.read(), 10)
    assert b"HTTP/1.1" not in rest  # the chunked body ends early, which clients notice
    assert not rest.endswith(b"0\r\n\r\n")
    writer.close()
    await api.ring.until(lambda: api.ring.aborted)


# ---- keys ------------------------------------------------------------------------------------------------


async def test_a_stream_is_resumed_only_with_the_key_that_began_it(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, config(resume_grace=5.0, api_key=("one", "two"))) as api:
        api.ring.script = lambda add: api.ring.token(add.request_id, "secret")
        body = {"prompt": "x", "stream": True, "max_tokens": 9}
        one = {"Authorization": "Bearer one"}
        async with api.http.post(api.url + COMPLETIONS, json=body, headers=one) as response:
            event = await EventReader(response).next()
        assert event.id is not None
        event_id = event.id.rpartition(":")[0] + ":0"
        resume = {"Last-Event-ID": event_id}
        for path in ("/health", "/metrics", "/ping", "/ready"):  # open paths
            async with api.http.get(api.url + path, headers=resume) as response:
                assert response.status == 200 and b"secret" not in await response.read()
        two = {"Authorization": "Bearer two", **resume}
        async with api.http.post(api.url + COMPLETIONS, json=body, headers=two) as response:
            assert response.status == 404
        async with api.http.post(api.url + COMPLETIONS, json=body, headers={**one, **resume}) as response:
            assert response.status == 200 and response.content_type == "text/event-stream"
            api.ring.finish(api.ring.added[-1].request_id)  # or the server waits for the grace time before it ends
            assert b"secret" in await response.read()


@pytest.mark.rule(19)
async def test_no_spelling_of_an_admin_path_opens_it(tmp_path: Path) -> None:
    """Rule 19."""
    paths = (
        "/%61bort_request", "/abort%5Frequest", "//abort_request", "/./abort_request", "/v1/../abort_request",
        "/abort_request/", "/abort_request?x=/health", "/abort_request#/health", "/health/../abort_request",
        "/abort_request;x", "http://x/abort_request", "/ABORT_REQUEST", "/flush%5fcache", "/flush_cache?/ping",
    )  # fmt: skip
    body = b'{"abort_all":true}'
    async with loaded_api(tmp_path, config(api_key=("user",), admin_api_key=("root",))) as api:
        for path in paths:
            for method in ("POST", "GET", "PUT"):
                head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer user\r\n"
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                answer = await raw(api, head.encode() + body)
                assert answer.split(b" ")[1] in (b"401", b"404", b"405", b"400"), (method, path, answer)
        assert api.ring.flushes == 0


# ---- overload --------------------------------------------------------------------------------------------


async def test_a_full_server_refuses_before_it_tokenizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = ServerConfig(scheduler=SchedulerConfig(max_num_seqs=1, max_num_queued=1))
    async with loaded_api(tmp_path, full) as api:
        api.ring.script = lambda add: None
        held = [asyncio.create_task(api.post(COMPLETIONS, {"prompt": "x"})) for _ in range(2)]
        await api.ring.until(lambda: len(api.ring.added) == 3)
        encoder = api.process.context.lifecycle.require_encoder()

        async def forbidden(*_: object, **__: object) -> list[list[int]]:
            raise AssertionError("tokenized for nothing")

        monkeypatch.setattr(encoder, "encode", forbidden)
        for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HI}), ("/generate", {"text": "x"})):
            status, answer = await api.post(path, body)
            assert (status, answer["error"]["error_code"]) == (503, "server_overloaded"), path
        for task in held:
            task.cancel()


@pytest.mark.rule(14)
async def test_the_engines_refusal_has_the_overload_status_too(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, config(overload_status="429")) as api:
        api.ring.script = lambda add: api.ring.refuse(add.request_id, 503, "The queue is full.", code="queue_full")
        async with api.http.post(api.url + COMPLETIONS, json={"prompt": "x"}) as response:
            assert response.status == 429 and response.headers["Retry-After"]
            assert (await response.json())["error"]["type"] == "rate_limit_error"


@pytest.mark.rule(8, 14)
async def test_too_many_connections_are_told_when_to_come_back(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, config(max_connections=1)) as api:
        answer = await raw(api, b"")
        assert answer.startswith(b"HTTP/1.1 503") and b"\r\nRetry-After: " in answer


async def test_one_key_cannot_take_the_whole_queue_of_a_fair_server(tmp_path: Path) -> None:
    fair = ServerConfig(
        api=ApiConfig(api_key=("one", "two")),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_queued=4, scheduling_policy="fair"),
    )
    async with loaded_api(tmp_path, fair) as api:
        api.ring.script = lambda add: None
        flood = [
            asyncio.create_task(api.post(COMPLETIONS, {"prompt": "x"}, Authorization="Bearer one")) for _ in range(20)
        ]
        await api.ring.until(lambda: len(api.ring.added) >= 5)
        await asyncio.sleep(0.3)
        other = asyncio.create_task(api.post(COMPLETIONS, {"prompt": "other"}, Authorization="Bearer two"))
        await api.ring.until(lambda: len(bytes(api.ring.added[-1].prompt_token_ids)) == 20)
        assert sum(task.done() for task in flood) == 16  # half of the places are kept for whoever else comes
        for task in (*flood, other):
            task.cancel()


# ---- the wire --------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order(api: Api) -> None:
    bodies = [json.dumps({"prompt": "x", "max_tokens": 1 + number}).encode() for number in range(5)]
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
    data = b"".join(
        head % (COMPLETIONS.encode(), b"Connection: close\r\n" if number == 4 else b"", len(body)) + body
        for number, body in enumerate(bodies)
    )
    answer = await raw(api, data)
    places = [answer.index(b'"text":"' + b"a" * number + b'"') for number in range(1, 6)]
    assert places == sorted(places) and answer.count(b"HTTP/1.1 200") == 5


async def test_an_unknown_expectation_gets_the_envelope(api: Api) -> None:
    answer = await raw(
        api,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: wonders\r\nConnection: close\r\n"
        b"Content-Length: 2\r\n\r\n{}",
    )
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 417") and json.loads(body)["error"]["code"] == 417


async def test_a_browser_may_send_the_headers_that_its_library_sends(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, config(cors_allow_origins=("https://a.example",))) as api:
        asked = "authorization,content-type,x-stainless-os,x-stainless-lang,anthropic-version"
        headers = {"Origin": "https://a.example", "Access-Control-Request-Headers": asked}
        async with api.http.options(api.url + CHAT, headers=headers) as response:
            allowed = {name.strip() for name in response.headers["Access-Control-Allow-Headers"].lower().split(",")}
            assert allowed >= set(asked.split(","))
        async with api.http.get(api.url + "/version", headers=headers) as response:
            exposed = response.headers["Access-Control-Expose-Headers"].lower()
            assert "x-request-id" in exposed and "retry-after" in exposed


def test_following_a_long_log_costs_only_what_is_new() -> None:
    log = EventLog("s", 1 << 30, lambda: 0.0)
    log.send(b"data: x\n\n" * 20_000)
    began_s = time.thread_time()
    for _ in range(2000):
        assert log.since(20_000) == []
    assert time.thread_time() - began_s < 0.1
    log.send(b"data: y\n\ndata: z\n\n")
    assert [event.split(b"\n")[1] for event in log.since(20_000)] == [b"data: y", b"data: z"]
    with pytest.raises(RequestError):
        log.since(20_003)


async def test_a_resumed_follower_that_falls_off_the_log_is_cut_without_a_second_answer(tmp_path: Path) -> None:
    small = config(resume_grace=5.0, stream_buffer_bytes=4096)
    async with loaded_api(tmp_path, small) as api:
        payload = json.dumps({"prompt": "x", "stream": True, "max_tokens": 9}).encode()
        api.ring.script = lambda add: api.ring.token(add.request_id, "a")
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(api.url).port)
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        writer.write(head % (COMPLETIONS.encode(), len(payload)) + payload)
        await asyncio.wait_for(reader.readuntil(b"\n\n"), 10)
        request_id = api.ring.added[-1].request_id
        (stream,) = api.process.context.resumes._streams.values()  # type: ignore[union-attr]
        for _ in range(100):
            stream.log.send(b"data: " + b"b" * 1000 + b"\n\n")  # in one turn: more than the log keeps
        api.ring.finish(request_id)
        rest = await asyncio.wait_for(reader.read(), 10)
        assert b"HTTP/1.1" not in rest and not rest.endswith(b"0\r\n\r\n")
        writer.close()


async def test_echo_shows_the_prompt_logprobs_that_were_asked_for(api: Api) -> None:
    def script(add: AddRequest) -> None:
        from nanoserve.ipc.messages import PromptTokenTexts
        from tests.integration.api_ring import token_text

        tokens = [token_text("h", None, 0), token_text("i", -1.0, 1)]
        api.ring.send(prompt_logprobs=[PromptTokenTexts(add.request_id, tokens)])
        api.ring.finish_at_once(add)

    api.ring.script = script
    body = {"prompt": "hi", "max_tokens": 1, "echo": True, "prompt_logprobs": 1}
    status, answer = await api.post(COMPLETIONS, body)
    assert status == 200
    assert answer["choices"][0]["prompt_logprobs"] == [
        None, {"105": {"logprob": -1.0, "rank": 1, "decoded_token": "i"}},
    ]  # fmt: skip


@pytest.mark.rule(73)
async def test_hang_ups_at_every_stage_leave_nothing(api: Api) -> None:
    api.ring.script = lambda add: None
    payload = json.dumps({"prompt": "x", "stream": True}).encode()
    whole = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (
        COMPLETIONS.encode(), len(payload),
    ) + payload  # fmt: skip
    for length in (1, 20, len(whole) - len(payload), len(whole) - 1, len(whole)):
        _, writer = await asyncio.open_connection("127.0.0.1", urlsplit(api.url).port)
        writer.write(whole[:length])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
    for _ in range(200):
        if not api.process.context.client.num_live and len(api.ring.aborted) == len(api.ring.added) - 1:
            break
        await asyncio.sleep(0.02)
    assert api.process.context.client.num_live == 0 and api.process.context.admission.num_held == 0


async def test_answers_tell_no_versions_of_libraries(api: Api) -> None:
    async with api.http.get(api.url + "/version") as response:
        assert response.headers["Server"] == "nanoserve"


@pytest.mark.rule(75)
async def test_a_client_that_never_reads_a_large_answer_is_cut_and_one_that_reads_slowly_is_not(tmp_path: Path) -> None:
    """What a unary answer pins in memory is bounded in time too."""
    async with loaded_api(tmp_path, config(write_timeout=0.3)) as api:

        def script(add: AddRequest) -> None:
            api.ring.send(
                request_ids=[add.request_id], deltas=["a" * 12_000_000], char_offset=[0], first_index=[0],
                num_tokens=[1], token_ids=pack_ids([97]),
            )  # fmt: skip
            api.ring.finish(add.request_id)

        api.ring.script = script
        payload = b'{"prompt":"x"}'
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

        def connect() -> socket.socket:
            sock = socket.socket()
            sock.connect(("127.0.0.1", urlsplit(api.url).port))
            sock.sendall(head % (COMPLETIONS.encode(), len(payload)) + payload)
            sock.setblocking(False)
            return sock

        loop = asyncio.get_running_loop()

        async def never_read() -> None:
            with connect() as silent:
                await asyncio.sleep(1.5)  # several times the limit
                received = 0
                with suppress(ConnectionResetError):
                    while chunk := await asyncio.wait_for(loop.sock_recv(silent, 1 << 20), 10):
                        received += len(chunk)
                assert received < 12_000_000  # what the kernel held, no more

        async def read_slowly() -> None:
            with connect() as slow:
                received = 0
                for _ in range(10):
                    received += len(await asyncio.wait_for(loop.sock_recv(slow, 1 << 20), 10))
                    await asyncio.sleep(0.1)
                while received < 12_000_000:
                    received += len(await asyncio.wait_for(loop.sock_recv(slow, 1 << 20), 10)) or 10**12
                assert received < 10**12

        await asyncio.gather(never_read(), read_slowly())
