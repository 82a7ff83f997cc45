"""What clients see and what the engine gets: fields, shapes, errors, operations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from nanoserve.api.prompt import MAX_MESSAGES
from nanoserve.config import ApiConfig, ServerConfig
from nanoserve.ipc.messages import AddRequest, EmitMode, FinishReason, TokenText
from tests.integration.api_ring import (
    CONTEXT,
    EOS,
    VOCAB,
    Api,
    idle,
    loaded_api,
    prompt_of,
    text_spec_of,
    token_text,
)
from tests.sse_grammar import check_error

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


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


@pytest.mark.rule(24, 69)
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


@pytest.mark.rule(21, 67, 68)
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


@pytest.mark.rule(17, 20, 28)
async def test_chat_unary_defaults_and_template_errors(api: Api) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    status, body = await api.post(CHAT, {"messages": [{"role": "user", "content": parts}]})
    prompt_length = len("<user>hi<assistant>")
    assert status == 200 and body["choices"][0]["message"]["content"] == "a" * (CONTEXT - prompt_length)
    status, body = await api.post(CHAT, {"messages": [{"role": "bad", "content": "x"}]})
    assert status == 400 and "roles must alternate" in body["error"]["message"]
    status, body = await api.post(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})
    assert status == 400 and "image_url" in body["error"]["message"]


@pytest.mark.rule(38, 62, 63)
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


@pytest.mark.rule(63)
async def test_the_token_that_ended_the_text_has_no_logprob_entry(api: Api) -> None:
    def script(add: AddRequest) -> None:
        end = replace_raw(token_text("!", -3.0, 1))
        api.ring.token(add.request_id, "a!", logprobs=[token_text("a", -1.0, 0), end])
        api.ring.finish(add.request_id, FinishReason.STOP, stop_token_id=ord("!"), is_eos=True)

    api.ring.script = script
    choice = (await api.post(COMPLETIONS, {"prompt": "hi", "logprobs": 0}))[1]["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)


def replace_raw(token: TokenText) -> TokenText:
    return msgspec.structs.replace(token, raw=b"")


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


@pytest.mark.rule(15)
async def test_request_id_is_echoed_and_unknown_fields_are_named(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 1, "frobnicate": 3}
    async with api.http.post(api.url + COMPLETIONS, json=body, headers={"X-Request-Id": "mine-1"}) as response:
        assert response.headers["X-Request-Id"] == "mine-1"
        assert "frobnicate" in response.headers["X-Nanoserve-Warnings"]
    async with api.http.post(api.url + COMPLETIONS, json={**body, "stream": True}) as response:
        assert response.headers["X-Request-Id"] and "frobnicate" in response.headers["X-Nanoserve-Warnings"]
    async with api.http.get(api.url + "/nothing") as response:
        assert response.headers["X-Request-Id"]


@pytest.mark.case(23, 27, 28, 29, 30, 31, 35, 40)
@pytest.mark.rule(9, 10, 11, 13, 14, 24)
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
        ({"prompt": "x", "stop_token_ids": [VOCAB]}, 400),
        ({"prompt": "x", "stop_token_ids": [-1]}, 400),
        ({"prompt": "x", "stop_token_ids": [2**40]}, 400),
        ({"prompt": "x", "stop_token_ids": [VOCAB - 1], "max_tokens": 1}, 200),
        ({"prompt": "x", "allowed_token_ids": [97, VOCAB]}, 400),
        ({"prompt": "x", "allowed_token_ids": [-1]}, 400),
        ({"prompt": "x", "logit_bias": {str(VOCAB): 1}}, 400),
        ({"prompt": [VOCAB]}, 400),
        ({"prompt": [VOCAB - 1], "max_tokens": 1}, 200),
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
        ({"prompt": "x", "stream": False, "stream_options": {"include_usage": True}}, 400),
        ({"prompt": "x", "min_tokens": 5, "max_tokens": 2}, 400),
        ({"prompt": "x", "top_k": -1, "max_tokens": 1}, 200),
        ({"prompt": "x", "top_p": 0}, 400),
    ],
)
async def test_bad_bodies_get_a_4xx_in_the_envelope(api: Api, body: object, status: int) -> None:
    """Also when a stream is asked for: whoever is refused gets a status and a JSON body."""
    asked: list[object] = [body, {"stream": True, **body}] if isinstance(body, dict) else [body]
    for each in asked if status != 200 else asked[:1]:
        got, answer = await api.post(COMPLETIONS, each)
        assert got == status, answer
        if status != 200:
            check_error(answer)
            assert answer["error"]["code"] == status and len(json.dumps(answer)) < 2048
    assert api.process.context.client.num_live == 0


async def test_a_repetition_penalty_leaves_logits_finite_or_is_refused(api: Api) -> None:
    """One of 1e-40 made infinities of them: a 500 for what the request itself had asked for."""
    for value in (0, 1e-40, 0.0009, 10.1, 1e40, -1):
        status, answer = await api.post(COMPLETIONS, {"prompt": "x", "repetition_penalty": value})
        assert (status, answer["error"]["param"]) == (400, "repetition_penalty"), value
        assert "[0.001, 10]" in answer["error"]["message"]
    for value in (0.001, 10):
        body = {"prompt": "x", "max_tokens": 1, "repetition_penalty": value}
        assert (await api.post(COMPLETIONS, body))[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize(("field", "value"), [("response_format", {"type": "json_object"}), ("lora_path", "x")])
async def test_every_protocol_refuses_what_would_change_the_answer(
    api: Api, path: str, field: str, value: object
) -> None:
    messages = [{"role": "user", "content": "x"}]
    body = {"input": messages} if path == "/v1/responses" else {"messages": messages, "max_tokens": 1}
    status, answer = await api.post(path, body | {field: value})
    assert status == 400 and field in json.dumps(answer)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}},
        {"type": "input_image", "image_url": "http://127.0.0.1:1/x.png"},
        {"type": "image", "source": {"type": "base64", "data": "AA=="}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "tool_result", "tool_use_id": "1", "content": "x"},
        {"type": "something-new", "text": "x"},
    ],
    ids=lambda part: part["type"],
)
async def test_parts_that_are_no_text_are_refused_as_what_we_do_not_do(api: Api, part: dict[str, object]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    for path, body, field in (
        ("/v1/chat/completions", {"messages": messages}, "messages"),
        ("/v1/chat/completions/render", {"messages": messages}, "messages"),
        ("/v1/responses", {"input": messages}, "input"),
        ("/v1/messages", {"messages": messages, "max_tokens": 1}, "messages"),
        ("/v1/messages/count_tokens", {"messages": messages}, "messages"),
        ("/tokenize", {"messages": messages}, "messages"),
    ):
        status, answer = await api.post(path, body)
        error = answer["error"]
        assert (status, error["param"], error["error_code"]) == (400, field, "unsupported_parameter"), path
        assert "something-new" not in error["message"]
    _, answer = await api.post("/v1/responses", {"input": [{"type": "function_call_output", "output": "x"}]})
    assert answer["error"]["error_code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_output_tokens", 0, "max_output_tokens must be at least 1, got 0."),
        ("input", [{"role": "user", "content": "x"}] * (MAX_MESSAGES + 1), "`input` may hold at most {} messages."),
    ],
)
async def test_errors_of_responses_say_its_own_names(api: Api, field: str, value: object, words: str) -> None:
    status, answer = await api.post("/v1/responses", {"input": "hi", field: value})
    assert (status, answer["error"]["param"]) == (400, field)
    assert answer["error"]["message"] == words.format(MAX_MESSAGES)


@pytest.mark.rule(26)
async def test_context_error_names_the_limit(api: Api) -> None:
    _, body = await api.post(COMPLETIONS, {"prompt": [1] * CONTEXT})
    assert f"maximum context length is {CONTEXT} tokens" in body["error"]["message"]
    assert body["error"]["error_code"] == "context_length_exceeded"


@pytest.mark.rule(8, 13, 17)
async def test_paths_methods_sizes_and_types_have_the_envelope(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(max_body_bytes=1000))
    async with loaded_api(tmp_path, config) as api:
        assert (await api.get("/nothing"))[1]["error"]["code"] == 404
        assert (await api.get(COMPLETIONS))[1]["error"]["code"] == 405
        assert (await api.post(COMPLETIONS, {"prompt": "x" * 2000}))[1]["error"]["code"] == 413
        status, body = await api.post(COMPLETIONS, {"prompt": "x"}, Content_Type="text/plain")
        assert status == 400 and "Unsupported Media Type" in body["error"]["message"]
        assert "`Content-Type: application/json`" in body["error"]["message"]  # curl says something else by itself

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b" " * 100

        headers = {"Content-Type": "application/json"}
        async with api.http.post(api.url + COMPLETIONS, data=chunks(), headers=headers) as response:
            assert response.status == 413


@pytest.mark.rule(8)
async def test_bodies_together_are_bounded_and_the_room_comes_back(tmp_path: Path) -> None:
    config = ServerConfig(api=ApiConfig(max_body_bytes=1000, max_bodies_bytes=1500))
    async with loaded_api(tmp_path, config) as api:
        half_read = asyncio.Event()
        may_go_on = asyncio.Event()

        async def slowly() -> AsyncIterator[bytes]:
            yield b'{"prompt": "x", "max_tokens": 1' + b" " * 868
            half_read.set()
            await may_go_on.wait()
            yield b"}"

        async def post(data: bytes | AsyncIterator[bytes]) -> tuple[int, str]:
            headers = {"Content-Type": "application/json"}
            async with api.http.post(api.url + COMPLETIONS, data=data, headers=headers) as response:
                await response.read()
                return response.status, response.headers.get("Retry-After", "")

        slow = asyncio.create_task(post(slowly()))
        await half_read.wait()
        bodies = api.process.context.bodies
        for _ in range(500):
            if bodies.num_bytes:
                break
            await asyncio.sleep(0.01)
        assert bodies.num_bytes == 899
        assert await post(b'{"prompt": "x"' + b" " * 700 + b"}") == (503, "1")
        assert (await post(b'{"prompt": "x", "max_tokens": 1}'))[0] == 200  # a small one has room
        may_go_on.set()
        assert (await slow)[0] == 200
        assert bodies.num_bytes == 0
        assert (await post(b'{"prompt": "x", "max_tokens": 1' + b" " * 700 + b"}"))[0] == 200


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


@pytest.mark.rule(14)
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


async def test_metrics_of_a_request_ride_on_its_answer_when_asked_for(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 3, "return_metrics": True}
    choice = (await api.post(COMPLETIONS, body))[1]["choices"][0]
    assert choice["metrics"]["time_to_first_token_ms"] >= 0 and choice["metrics"]["mean_itl_ms"] is not None
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "return_metrics": True}
    for path, request in ((COMPLETIONS, body), (CHAT, chat)):
        events = await api.events(path, request)
        assert events[-1]["choices"][0]["metrics"]["tokens_per_second"] > 0
        assert all("metrics" not in event["choices"][0] for event in events[:-1])
    assert "metrics" not in (await api.post(COMPLETIONS, {"prompt": "x"}))[1]["choices"][0]
