"""The api process against a peer that plays the ring: life cycle, first frame, hang-ups, errors, idempotence."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from nanoserve.config import ApiConfig, ServerConfig
from nanoserve.ipc.columns import unpack_ids
from nanoserve.ipc.messages import AbortCause, AddRequest, EmitMode, FinishReason, ProcessFacts
from tests.integration.api_ring import (
    CONTEXT,
    EOS,
    Api,
    loaded_api,
    parse_events,
    prompt_of,
    running_api,
    text_spec_of,
    token_text,
    write_model,
)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    async with loaded_api(tmp_path) as running:
        yield running


def idle(_: AddRequest) -> None:
    """A script that leaves the request to the test."""


async def test_answers_while_loading_and_turns_ready_with_the_ring(tmp_path: Path) -> None:
    async with running_api() as api:
        api.ring.status(stage="loading weights", progress=0.5)
        while (await api.get("/ready"))[1]["stage"] != "loading weights":
            await asyncio.sleep(0.01)
        assert api.link.ready_calls == [False]
        assert (await api.get("/health"))[0] == 200
        status, body = await api.get("/ready")
        assert (status, body["progress"]) == (503, 0.5)
        async with api.http.post(api.url + COMPLETIONS, json={"prompt": "x"}) as response:
            assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == 503
        api.load(write_model(tmp_path))
        await api.until_ready()
        assert api.link.ready_calls == [False, True]
        assert len(api.ring.added) == 1 and api.ring.added[0].sampling.max_tokens == 1
        await api.ring.until(lambda: api.ring.released == [api.ring.added[0].request_id])


async def test_first_frame_reaches_the_client_when_one_token_exists(api: Api) -> None:
    api.ring.script = idle
    async with asyncio.timeout(10):
        request = asyncio.create_task(
            api.http.post(api.url + CHAT, json={"messages": [{"role": "user", "content": "x"}], "stream": True})
        )
        add = await api.ring.next_added()
        await asyncio.sleep(0.05)
        assert not request.done()  # accepted, but nothing to say yet: no status line
        api.ring.token(add.request_id, "A")  # the gate: exactly one token exists from here on
        response = await request
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Accel-Buffering"] == "no" and response.headers["Cache-Control"] == "no-cache"
        lines = [json.loads((await response.content.readuntil(b"\n\n"))[6:]) for _ in range(2)]
        assert lines[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert lines[1]["choices"][0]["delta"] == {"content": "A"}
        assert api.ring.sent[add.request_id] == 1
        api.ring.finish(add.request_id)
        assert parse_events(await response.content.read())[0]["choices"][0]["finish_reason"] == "length"


async def test_hang_up_while_streaming_aborts_at_once(api: Api) -> None:
    api.ring.script = idle
    body = {"prompt": "x", "max_tokens": 50, "stream": True}
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
    add = await api.ring.next_added()
    api.ring.token(add.request_id, "a")
    response = await request
    await response.content.readuntil(b"\n\n")
    api.ring.token(add.request_id, "b")
    await response.content.readuntil(b"\n\n")
    response.close()
    await api.ring.until(lambda: api.ring.aborted)  # no further token was needed to notice
    assert api.ring.aborted[0].request_ids == [add.request_id]
    assert api.ring.aborted[0].cause == AbortCause.CLIENT_GONE
    assert api.process.context.client.num_live == 0
    api.ring.token(add.request_id, "late")
    api.ring.finish(add.request_id, FinishReason.ABORT)
    await api.ring.until(lambda: add.request_id in api.ring.released)
    assert api.process.context.client.num_ending == 0
    assert api.process.context.client.counters.late_rows == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_hang_up_before_the_first_token_aborts(api: Api, stream: bool) -> None:
    api.ring.script = idle
    body = {"prompt": "x", "max_tokens": 5, "stream": stream}
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
    add = await api.ring.next_added()
    request.cancel()
    await api.ring.until(lambda: api.ring.aborted)
    assert api.ring.aborted[0].request_ids == [add.request_id]
    assert api.process.context.admission.num_held == 0 or await _settled(api)


async def _settled(api: Api) -> bool:
    for _ in range(100):
        if api.process.context.admission.num_held == 0:
            return True
        await asyncio.sleep(0.01)
    return False


async def test_refusal_by_the_engine_is_a_status_even_when_streaming(api: Api) -> None:
    api.ring.auto_accept = False
    api.ring.script = lambda add: api.ring.refuse(add.request_id, 400, "This can never fit.")
    status, body = await api.post(COMPLETIONS, {"prompt": "x", "stream": True})
    assert status == 400
    assert body["error"] == {
        "message": "This can never fit.",
        "type": "invalid_request_error",
        "param": None,
        "code": 400,
    }
    api.ring.script = lambda add: api.ring.refuse(add.request_id, 503, "The queue is full.")
    async with api.http.post(api.url + COMPLETIONS, json={"prompt": "x"}) as response:
        assert response.status == 503 and "Retry-After" in response.headers


async def test_failure_after_the_first_byte_is_an_event_then_done(api: Api) -> None:
    api.ring.script = idle
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": True}))
    add = await api.ring.next_added()
    api.ring.token(add.request_id, "ab")
    response = await request
    api.ring.refuse(add.request_id, 500, "The row broke.")
    events = parse_events(await response.content.read())
    assert events[0]["choices"][0]["text"] == "ab"
    assert events[-1]["error"] == {"message": "The row broke.", "type": "server_error", "param": None, "code": 500}
    # the connection stays usable and the other requests are untouched
    api.ring.script = api.ring.finish_at_once
    assert (await api.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2}))[1]["choices"][0]["text"] == "aa"


async def test_repeats_are_dropped_and_a_gap_ends_the_request(api: Api) -> None:
    def script(add: AddRequest) -> None:
        rid = add.request_id
        api.ring.token(rid, "abc")
        api.ring.token(rid, "abcd", at=0)  # a restarted detokenizer says it all again
        api.ring.token(rid, "cde", at=2)
        api.ring.finish(rid)

    api.ring.script = script
    events = await api.events(COMPLETIONS, {"prompt": "x", "stream": True, "return_token_ids": True})
    assert "".join(e["choices"][0]["text"] for e in events) == "abcde"
    ids = [i for e in events for i in e["choices"][0].get("token_ids", [])]
    assert ids == [ord(c) for c in "abcde"]

    def gap(add: AddRequest) -> None:
        api.ring.token(add.request_id, "ab")
        api.ring.token(add.request_id, "z", at=5)

    api.ring.script = gap
    status, body = await api.post(COMPLETIONS, {"prompt": "x"})
    assert (status, body["error"]["type"]) == (500, "server_error")
    assert api.process.context.client.counters.gaps == 1
    await api.ring.until(lambda: api.ring.aborted)


async def test_a_new_engine_gets_live_requests_with_their_ids(api: Api) -> None:
    api.ring.script = idle
    body = {"prompt": "x", "max_tokens": 5, "stream": True, "temperature": 1.0}
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
    add = await api.ring.next_added()
    api.ring.token(add.request_id, "ab")
    response = await request
    await response.content.readuntil(b"\n\n")
    api.ring.engine_incarnation = 2
    api.ring.status(stage="ready", processes=[ProcessFacts("engine-0", 1, 2, "ready")])
    await api.ring.until(lambda: len(api.ring.added) == 3)
    again = api.ring.added[2]
    assert again.request_id == add.request_id and again.sampling == add.sampling
    assert unpack_ids(again.output_token_ids) == [ord("a"), ord("b")]
    api.ring.token(add.request_id, "abcde", at=0)
    api.ring.finish(add.request_id)
    events = parse_events(await response.content.read())
    assert "".join(e["choices"][0]["text"] for e in events) == "cde"


async def test_failed_server_ends_every_stream(api: Api) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": True}))
    response = await request
    await response.content.readuntil(b"\n\n")
    api.ring.status(stage="failed", failed="engine-0 crashed too often")
    events = parse_events(await response.content.read())
    assert events[-1]["error"]["code"] == 503
    assert (await api.post(COMPLETIONS, {"prompt": "x"}))[0] == 503
    assert (await api.get("/health"))[0] == 503


async def test_drain_lets_streams_finish_and_refuses_new_ones(tmp_path: Path) -> None:
    async with loaded_api(tmp_path) as api:
        api.ring.script = idle
        request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": True}))
        add = await api.ring.next_added()
        api.ring.token(add.request_id, "ab")
        response = await request
        api.link.stop()
        while (await api.get("/ready"))[0] == 200:
            await asyncio.sleep(0.01)
        assert (await api.get("/health"))[0] == 200
        assert (await api.post(COMPLETIONS, {"prompt": "x"}))[0] == 503
        api.ring.token(add.request_id, "cd")
        api.ring.finish(add.request_id)
        events = parse_events(await response.content.read())
        assert "".join(e["choices"][0]["text"] for e in events) == "abcd"


async def test_drain_timeout_gives_an_error_event(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(drain_timeout=0.1))
    async with loaded_api(tmp_path, config) as api:
        api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
        response = await api.http.post(api.url + COMPLETIONS, json={"prompt": "x", "stream": True})
        api.link.stop()
        events = parse_events(await response.content.read())
        assert events[-1]["error"]["code"] == 503


async def test_slow_reader_gets_merged_text_and_holds_nobody(api: Api) -> None:
    """While a client does not read, its pieces merge; what it then reads is whole."""
    api.ring.script = idle
    body = {"prompt": "x", "stream": True, "max_tokens": 40}
    request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
    add = await api.ring.next_added()
    for char in "abcdefgh":
        api.ring.token(add.request_id, char)
    api.ring.finish(add.request_id)
    await api.ring.until(lambda: add.request_id in api.ring.released)
    events = parse_events(await (await request).content.read())
    assert "".join(e["choices"][0]["text"] for e in events) == "abcdefgh"
    assert len(events) <= 9


async def test_keep_alive_comment_sends_headers_early(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(sse_keep_alive=0.05))
    async with loaded_api(tmp_path, config) as api:
        api.ring.script = idle
        body = {"prompt": "x", "stream": True}
        request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
        add = await api.ring.next_added()
        response = await asyncio.wait_for(request, 5)  # no token yet, but the request is accepted
        assert (await response.content.readuntil(b"\n\n")).startswith(b": ")
        api.ring.token(add.request_id, "a")
        api.ring.finish(add.request_id)
        assert parse_events(await response.content.read())[0]["choices"][0]["text"] == "a"


async def test_headers_wait_for_admission(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(sse_keep_alive=0.05))
    async with loaded_api(tmp_path, config) as api:
        api.ring.script = idle
        api.ring.auto_accept = False
        body = {"prompt": "x", "stream": True}
        request = asyncio.create_task(api.http.post(api.url + COMPLETIONS, json=body))
        add = await api.ring.next_added()
        await asyncio.sleep(0.6)  # many keep-alive intervals
        assert not request.done()
        api.ring.refuse(add.request_id, 503, "full")
        assert (await request).status == 503


async def test_deadline_answers_with_what_is_there(api: Api) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    status, body = await api.post(COMPLETIONS, {"prompt": "x", "timeout_s": 0.1})
    assert status == 200
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "abort", "timeout")
    assert body["usage"]["completion_tokens"] == 2
    await api.ring.until(lambda: api.ring.aborted)
    assert api.ring.aborted[0].cause == AbortCause.DEADLINE


async def test_queue_deadline_is_a_503(api: Api) -> None:
    api.ring.script = idle
    status, body = await api.post(COMPLETIONS, {"prompt": "x", "queue_timeout_s": 0.1, "stream": True})
    assert (status, body["error"]["error_code"]) == (503, "queue_timeout")
    await api.ring.until(lambda: api.ring.aborted)


async def test_what_the_engine_gets(api: Api) -> None:
    status, body = await api.post(
        COMPLETIONS,
        {
            "prompt": "Hello, all",
            "max_tokens": 3,
            "temperature": 0.5,
            "seed": 7,
            "stop": ["x", "yy"],
            "logit_bias": {"5": 200},
            "stop_token_ids": [3],
            "n": 2,
        },
    )
    assert status == 200, body
    first, second = api.ring.added[1:]
    assert prompt_of(first) == list(b"Hello, all")
    assert (first.sampling.seed, second.sampling.seed) == (7, 8)
    assert first.sampling.logit_bias == {5: 100.0} and first.sampling.stop_token_ids == (3,)
    spec = text_spec_of(first)
    assert spec.prompt_tail == tuple(b"o, all"[-5:]) and spec.stop == ("x", "yy") and spec.emit == EmitMode.FINAL
    assert [c["index"] for c in body["choices"]] == [0, 1]
    assert body["usage"]["prompt_tokens"] == 10 and body["usage"]["completion_tokens"] == 6


async def test_prompt_shapes_and_indices(api: Api) -> None:
    for prompt in ("ab", ["ab"], [97, 98], [[97, 98]]):
        status, body = await api.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2})
        assert (status, body["usage"]["prompt_tokens"]) == (200, 2)
    status, body = await api.post(
        COMPLETIONS, {"prompt": ["a b", "c d e"], "n": 2, "temperature": 1, "echo": True, "max_tokens": 1}
    )
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "a ba"), (1, "a ba"), (2, "c d ea"), (3, "c d ea"),
    ]  # fmt: skip
    events = await api.events(
        COMPLETIONS,
        {
            "prompt": ["a b", "c d e"],
            "n": 2,
            "max_tokens": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    finishes = [e["choices"][0]["index"] for e in events if e["choices"] and e["choices"][0]["finish_reason"]]
    assert sorted(finishes) == [0, 1, 2, 3]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4
    assert events[-1]["usage"]["prompt_tokens"] == 8


async def test_chat_stream_frames(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    events = await api.events(CHAT, {**body, "stream_options": {"include_usage": True}})
    deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "aa"}, {}]
    assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]] == [None, None, "length"]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["total_tokens"] == len("<user>hi<assistant>") + 2
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert "usage" not in events[0]
    assert bytes(prompt_of(api.ring.added[-1])) == b"<user>hi<assistant>"  # no BOS is added to rendered text


async def test_chat_unary_defaults_and_template_errors(api: Api) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    status, body = await api.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    prompt_length = len("<user>hi<assistant>")
    assert status == 200 and body["choices"][0]["message"]["content"] == "a" * (CONTEXT - prompt_length)
    status, body = await api.post(CHAT, {"messages": [{"role": "bad", "content": "x"}]})
    assert status == 400 and "roles must alternate" in body["error"]["message"]
    status, body = await api.post(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert status == 400 and "image_url" in body["error"]["message"]


async def test_chat_logprobs_have_bytes_and_completions_offsets(api: Api) -> None:
    def script(add: AddRequest) -> None:
        top = [(98, "b", b"b", -0.5), (99, "c", b"c", float("-inf"))]
        api.ring.token(add.request_id, "ab", logprobs=[token_text("a", -1.0, 0, top), token_text("b", -2.0, 1, top)])
        api.ring.finish(add.request_id)

    api.ring.script = script
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    content = (await api.post(CHAT, body))[1]["choices"][0]["logprobs"]["content"]
    assert [c["bytes"] for c in content] == [[97], [98]]
    assert content[0]["top_logprobs"][1] == {"token": "c", "logprob": -9999.0, "bytes": [99]}
    shown = (await api.post(COMPLETIONS, {"prompt": "hi", "logprobs": 1}))[1]["choices"][0]["logprobs"]
    assert shown["tokens"] == ["a", "b"] and shown["text_offset"] == [0, 1]
    assert shown["top_logprobs"][0] == {"b": -0.5, "a": -1.0}


async def test_the_token_that_ended_the_text_has_no_logprob_entry(api: Api) -> None:
    def script(add: AddRequest) -> None:
        end = token_text("!", -3.0, 1)
        api.ring.token(add.request_id, "a!", logprobs=[token_text("a", -1.0, 0), end])
        api.ring.finish(add.request_id, FinishReason.STOP, stop_token_id=ord("!"), is_eos=True)

    api.ring.script = script
    choice = (await api.post(COMPLETIONS, {"prompt": "hi", "logprobs": 0}))[1]["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


async def test_operations(api: Api) -> None:
    api.ring.stats(num_running=3, steps=7, blocks_total=100)
    _, body = await api.get("/v1/models")
    assert [m["id"] for m in body["data"]] == ["tiny", "alias"] and body["data"][0]["max_model_len"] == CONTEXT
    assert (await api.get("/v1/models/alias"))[0] == 200
    assert (await api.get("/v1/models/other"))[1]["error"]["code"] == 404
    assert (await api.post("/tokenize", {"prompt": "ab"}))[1]["tokens"] == [97, 98]
    assert (await api.post("/detokenize", {"tokens": [97, 98]}))[1]["prompt"] == "ab"
    assert (await api.post("/detokenize", {"tokens": [VOCAB_PLUS]}))[0] == 400
    assert "version" in (await api.get("/version"))[1]
    while "nanoserve_num_requests_running 3.0" not in (text := (await api.get("/metrics"))[1]):
        await asyncio.sleep(0.01)
    assert "nanoserve_engine_steps_total 7.0" in text and "nanoserve_kv_blocks_total 100.0" in text
    info = (await api.get("/server_info"))[1]
    assert info["engine"]["max_model_len"] == CONTEXT and info["model"] == "tiny"


VOCAB_PLUS = EOS + 10


async def test_request_id_is_echoed_and_unknown_fields_are_named(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 1, "frobnicate": 3}
    async with api.http.post(api.url + COMPLETIONS, json=body, headers={"X-Request-Id": "mine-1"}) as response:
        assert response.headers["X-Request-Id"] == "mine-1"
        assert "frobnicate" in response.headers["X-Nanoserve-Warnings"]
    async with api.http.post(api.url + COMPLETIONS, json={**body, "stream": True}) as response:
        assert response.headers["X-Request-Id"] and "frobnicate" in response.headers["X-Nanoserve-Warnings"]
    async with api.http.get(api.url + "/nothing") as response:
        assert response.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[1]", 400),
        (b'{"prompt":"\xfe"}', 400),
        (b'{"prompt":"\\ud800"}', 400),
        (b'{"prompt":"x","temperature":NaN}', 400),
        (b'{"prompt":"x","top_p":Infinity}', 400),
        (b'{"prompt":"x","temperature":1e400}', 400),
        (b'{"prompt":"x","z":' + b"[" * 50_000, 400),
        (b'{"prompt":"x","seed":' + b"9" * 5000 + b"}", 400),
        (b'{"prompt":"x"} trailing', 400),
        ({"prompt": "x", "model": "other"}, 404),
        ({"prompt": [3, "x"]}, 400),
        ({"prompt": [[]]}, 400),
        ({"prompt": []}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": [True]}, 400),
        ({"prompt": [1.5]}, 400),
        ({}, 400),
        ({"prompt": [VOCAB_PLUS]}, 400),
        ({"prompt": [-7]}, 400),
        ({"prompt": [2**33]}, 400),
        ({"prompt": [2**66]}, 400),
        ({"prompt": "x", "logit_bias": {"49152": 1}}, 400),
        ({"prompt": "x", "logit_bias": {"x": 1}}, 400),
        ({"prompt": "x", "logit_bias": {"-3": 1}}, 400),
        ({"prompt": "x", "logit_bias": {"7": "y"}}, 400),
        ({"prompt": "x", "seed": 2**63}, 400),
        ({"prompt": "x", "seed": -(2**63) - 1}, 400),
        ({"prompt": "x", "seed": "a"}, 400),
        ({"prompt": "x", "seed": 2**63 - 1, "max_tokens": 1}, 200),
        ({"prompt": "x", "n": 0, "stream": True}, 400),
        ({"prompt": "x", "n": -3, "stream": True}, 400),
        ({"prompt": "x", "n": 10**9, "stream": True}, 400),
        ({"prompt": "x", "n": 2, "temperature": 0}, 400),
        ({"prompt": "x", "stop": [""]}, 400),
        ({"prompt": "x", "max_tokens": 0}, 400),
        ({"prompt": "x", "max_tokens": CONTEXT}, 400),
        ({"prompt": [1] * CONTEXT, "stream": True}, 400),
        ({"prompt": [1] * (CONTEXT - 1), "max_tokens": 1}, 200),
        ({"prompt": [1] * (CONTEXT - 1)}, 200),
        ({"prompt": "x" * 5_000_000}, 400),
        ({"prompt": "x", "best_of": 3}, 400),
        ({"prompt": "x", "best_of": 1, "max_tokens": 1}, 200),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, 400),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, 400),
        ({"prompt": "x", "min_tokens": 5, "max_tokens": 2}, 400),
        ({"prompt": "x", "top_k": -1, "max_tokens": 1}, 200),
        ({"prompt": "x", "top_p": 0}, 400),
    ],
)
async def test_bad_bodies_get_a_4xx_in_the_envelope(api: Api, body: object, status: int) -> None:
    got, answer = await api.post(COMPLETIONS, body)
    assert got == status, answer
    if status != 200:
        assert answer["error"].keys() >= {"message", "type", "param", "code"}
        assert answer["error"]["code"] == status and len(json.dumps(answer)) < 2048


async def test_context_error_names_the_limit(api: Api) -> None:
    _, body = await api.post(COMPLETIONS, {"prompt": [1] * CONTEXT})
    assert f"maximum context length is {CONTEXT} tokens" in body["error"]["message"]
    assert body["error"]["error_code"] == "context_length_exceeded"


async def test_paths_methods_sizes_and_types_have_the_envelope(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(max_body_bytes=1000))
    async with loaded_api(tmp_path, config) as api:
        assert (await api.get("/nothing"))[1]["error"]["code"] == 404
        assert (await api.get(COMPLETIONS))[1]["error"]["code"] == 405
        assert (await api.post(COMPLETIONS, {"prompt": "x" * 2000}))[1]["error"]["code"] == 413
        status, body = await api.post(COMPLETIONS, {"prompt": "x"}, Content_Type="text/plain")
        assert status == 400 and "Unsupported Media Type" in body["error"]["message"]

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        headers = {"Content-Type": "application/json"}
        async with api.http.post(api.url + COMPLETIONS, data=chunks(), headers=headers) as response:
            assert response.status == 413


async def test_model_defaults_apply_unless_told_otherwise(tmp_path: Path) -> None:
    generation = {"temperature": 0.25, "top_k": 9}
    async with loaded_api(tmp_path / "a", generation=generation) as api:
        await api.post(COMPLETIONS, {"prompt": "x"})
        assert (api.ring.added[-1].sampling.temperature, api.ring.added[-1].sampling.top_k) == (0.25, 9)
    config = ServerConfig()
    config = replace(config, model=replace(config.model, sampling_defaults="openai"))
    async with loaded_api(tmp_path / "b", config, generation=generation) as api:
        await api.post(COMPLETIONS, {"prompt": "x"})
        assert (api.ring.added[-1].sampling.temperature, api.ring.added[-1].sampling.top_k) == (1.0, 0)


async def test_admission_limit_is_a_503_with_retry_after(tmp_path: Path) -> None:
    config = ServerConfig()
    config = replace(config, scheduler=replace(config.scheduler, max_num_seqs=1, max_num_queued=1))
    async with loaded_api(tmp_path, config) as api:
        api.ring.script = idle
        waiting = [asyncio.create_task(api.post(COMPLETIONS, {"prompt": "x"})) for _ in range(2)]
        await api.ring.until(lambda: len(api.ring.added) == 3)
        async with api.http.post(api.url + COMPLETIONS, json={"prompt": "x"}) as response:
            assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
        for add in api.ring.added[1:]:
            api.ring.finish(add.request_id)
        assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]


async def test_strict_params(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, ServerConfig(api=ApiConfig(strict_params=True))) as api:
        assert (await api.post(COMPLETIONS, {"prompt": "x", "frobnicate": 1}))[0] == 400
