"""The native route, control paths, and fields that become something else on the wire."""

from __future__ import annotations

import asyncio

import pytest

from nanoserve.ipc.messages import AddRequest, FinishReason
from tests.integration.api_ring import CONTEXT, Api, prompt_of, token_text

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


async def test_generate_takes_texts_and_ids(api: Api) -> None:
    params = {"max_new_tokens": 3, "temperature": 0}
    for prompt in ({"text": "ab"}, {"input_ids": [97, 98]}):
        status, body = await api.post("/generate", {**prompt, "sampling_params": params})
        assert status == 200 and body["text"] == "aaa" and body["output_ids"] == [97] * 3
        meta = body["meta_info"]
        assert (meta["prompt_tokens"], meta["completion_tokens"]) == (2, 3)
        assert meta["finish_reason"] == {"type": "length", "length": 3} and meta["e2e_latency"] > 0
    status, body = await api.post("/generate", {"text": ["ab", "c"], "sampling_params": params})
    assert [entry["meta_info"]["prompt_tokens"] for entry in body] == [2, 1]
    status, body = await api.post("/generate", {"input_ids": [[97]], "sampling_params": params})
    assert isinstance(body, list)
    await api.post("/generate", {"text": "ab"})
    assert api.ring.added[-1].sampling.max_tokens == CONTEXT - 2  # its default of 128 never makes it too long


@pytest.mark.parametrize(
    "body",
    [{}, {"text": "a", "input_ids": [1]}, {"text": [1]}, {"input_ids": "a"}, {"text": "a", "sampling_params": 3},
     {"text": "a", "sampling_params": {"max_new_tokens": -1}}, {"text": "a", "sampling_params": {"regex": "a"}},
     {"text": "a", "lora_path": "x"}],
)  # fmt: skip
async def test_generate_refuses(api: Api, body: object) -> None:
    status, answer = await api.post("/generate", body)
    assert status == 400 and answer["error"]["code"] == 400


@pytest.mark.parametrize("given", ["x", 3, [], True])
async def test_sampling_params_that_are_no_object_are_named(api: Api, given: object) -> None:
    status, answer = await api.post("/generate", {"text": "a", "sampling_params": given})
    assert (status, answer["error"]["param"]) == (400, "sampling_params")


async def test_generate_streams_deltas_and_logprobs(api: Api) -> None:
    def script(add: AddRequest) -> None:
        for position, char in enumerate("abc"):
            top = [(98, "b", b"b", -0.5)]
            api.ring.token(add.request_id, char, logprobs=[token_text(char, -1.0, position, top)])
        api.ring.finish(add.request_id, FinishReason.STOP, stop_string="END")

    api.ring.script = script
    events = await api.events(
        "/generate",
        {"text": "x", "return_logprob": True, "top_logprobs_num": 1, "sampling_params": {"max_new_tokens": 5}},
    )
    assert "".join(event["text"] for event in events) == "abc"
    assert [i for event in events for i in event["output_ids"]] == [97, 98, 99]
    scores = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    assert scores == [[-1.0, 97, None], [-1.0, 98, None], [-1.0, 99, None]]
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "END"}


async def test_render_is_the_prompt_of_the_chat_route(api: Api) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    rendered = (await api.post(CHAT + "/render", body))[1]
    await api.post(CHAT, body)
    assert rendered["prompt"] == "<user>hi<assistant>"
    assert rendered["prompt_token_ids"] == prompt_of(api.ring.added[-1])


async def test_pieces_of_partial_characters_are_bytes(api: Api) -> None:
    tokens = (await api.post("/tokenize", {"prompt": "aé", "with_pieces": True}))[1]["tokens"]
    assert [token["piece"] for token in tokens] == ["a", [0xC3], [0xA9]]


async def test_abort_by_the_exact_label(api: Api) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    first = asyncio.create_task(api.post(COMPLETIONS, {"prompt": "x", "request_id": "job-1", "timeout_s": 60}))
    second = asyncio.create_task(api.post(COMPLETIONS, {"prompt": "x", "timeout_s": 60}, X_Request_Id="job-12"))
    await api.ring.until(lambda: len(api.ring.added) == 3)
    assert (await api.post("/abort_request", {"rid": "job"}))[1] == {"aborted": [], "unknown": ["job"]}
    assert (await api.post("/abort_request", {"rid": "job-1"}))[1] == {"aborted": ["job-1"], "unknown": []}
    choice = (await first)[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "abort")
    assert not second.done()
    assert "job-12" in (await api.post("/abort_request", {"abort_all": True}))[1]["aborted"]
    assert (await second)[0] == 200
    await api.ring.until(lambda: len(api.ring.aborted) == 2)
    assert (await api.post("/abort_request", {}))[0] == 400


async def test_health_generate_takes_a_token_round(api: Api) -> None:
    assert (await api.get("/health_generate"))[0] == 200
    assert api.ring.added[-1].sampling.max_tokens == 1
    api.ring.script = lambda add: api.ring.refuse(add.request_id, 500, "broken")
    assert (await api.get("/health_generate"))[0] == 503


async def test_loads_and_model_info(api: Api) -> None:
    api.ring.stats(num_running=2, num_waiting=3, blocks_used=4, blocks_total=9)
    while (loads := (await api.get("/v1/loads"))[1])["waiting"] != 3:
        await asyncio.sleep(0.01)
    assert (loads["running"], loads["kv_used"], loads["kv_total"]) == (2, 4, 9) and loads["queue_eta_s"] >= 1
    assert (await api.get("/model_info"))[1]["max_model_len"] == CONTEXT


async def test_flush_cache_reaches_the_engine(api: Api) -> None:
    for number in (1, 2):
        assert (await api.post("/flush_cache", {}))[1] == {"status": "ok", "freed_blocks": 7, "running": 0}
        assert api.ring.flushes == number  # the answer waits for the engine's


async def test_bad_words_travel_as_ids_with_and_without_a_space(api: Api) -> None:
    await api.post(COMPLETIONS, {"prompt": "x", "bad_words": ["no"], "max_tokens": 1})
    assert api.ring.added[-1].sampling.bad_words == (tuple(b"no"), tuple(b" no"))
    assert (await api.post(COMPLETIONS, {"prompt": "x", "bad_words": [""]}))[0] == 400


async def test_allowed_ids_travel_as_deciding_biases(api: Api) -> None:
    body = {"prompt": "x", "allowed_token_ids": [5, 6, 7], "logit_bias": {"6": -3, "7": -100}, "max_tokens": 1}
    await api.post(COMPLETIONS, body)
    assert api.ring.added[-1].sampling.logit_bias == {5: 200.0, 6: 197.0}
    for bad in ([], [-1], [10**6]):
        assert (await api.post(COMPLETIONS, {"prompt": "x", "allowed_token_ids": bad}))[0] == 400


async def test_truncation_keeps_the_end(api: Api) -> None:
    await api.post(COMPLETIONS, {"prompt": "abcdef", "truncate_prompt_tokens": 2, "max_tokens": 1})
    assert bytes(prompt_of(api.ring.added[-1])) == b"ef"
    await api.post(COMPLETIONS, {"prompt": "x" * 500, "truncate_prompt_tokens": -1, "max_tokens": 4})
    assert len(prompt_of(api.ring.added[-1])) == CONTEXT - 4
    assert (await api.post(COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 0}))[0] == 400


async def test_a_round_whose_end_comes_after_its_token_is_whole(api: Api) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "a")
    asked = asyncio.create_task(api.get("/health_generate"))
    add = await api.ring.next_added()
    stream = api.process.context.client._live[add.request_id]
    while not stream.first_ns:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    api.ring.finish(add.request_id)
    assert (await asyncio.wait_for(asked, 5))[0] == 200
