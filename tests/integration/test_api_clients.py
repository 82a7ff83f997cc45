"""Real clients against the api process: openai, anthropic, langchain, litellm. They parse, so the frames are right."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from nanoserve.ipc.messages import AddRequest, FinishReason
from tests.integration.api_ring import Api, prompt_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # their imports are slow and warn

HI: Any = [{"role": "user", "content": "hi"}]


def client_library(name: str) -> Any:
    return importlib.import_module(pytest.importorskip(name).__name__)


def script_text(api: Api, text: str, reason: FinishReason = FinishReason.STOP, **fields: Any) -> None:
    def script(add: AddRequest) -> None:
        for char in text:
            api.ring.token(add.request_id, char)
        api.ring.finish(add.request_id, reason, **fields)

    api.ring.script = script


@pytest.fixture
async def openai_client(api: Api) -> AsyncIterator[Any]:
    openai = client_library("openai")
    async with openai.AsyncOpenAI(base_url=api.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_openai_chat_and_completions(api: Api, openai_client: Any) -> None:
    script_text(api, "hello", is_eos=True)
    answer = await openai_client.chat.completions.create(model="tiny", messages=HI)
    assert answer.choices[0].message.content == "hello" and answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 5 and answer.usage.prompt_tokens_details.cached_tokens == 0
    answer = await openai_client.completions.create(model="tiny", prompt="x", max_tokens=5)
    assert answer.choices[0].text == "hello"
    assert [model.id async for model in openai_client.models.list()] == ["tiny", "alias"]
    assert (await openai_client.models.retrieve("tiny")).id == "tiny"


async def test_openai_streams(api: Api, openai_client: Any) -> None:
    script_text(api, "hello", is_eos=True)
    options = {"include_usage": True}
    stream = await openai_client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options=options)
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "hello"
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.total_tokens > 5
    stream = await openai_client.completions.create(model="tiny", prompt="x", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello"


async def test_openai_errors_are_its_own_classes(api: Api, openai_client: Any) -> None:
    openai = client_library("openai")
    with pytest.raises(openai.NotFoundError) as missing:
        await openai_client.chat.completions.create(model="other", messages=HI)
    assert missing.value.param == "model" and missing.value.body["error_code"] == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await openai_client.chat.completions.create(model="tiny", messages=HI, temperature=3.0, stream=True)
    assert "temperature must be in [0, 2], got 3" in bad.value.message
    raw = await openai_client.chat.completions.with_raw_response.create(model="tiny", messages=HI, max_tokens=2)
    assert raw.headers["x-request-id"] and raw.parse().choices[0].message.content == "aa"


async def test_openai_error_in_a_stream_is_raised(api: Api, openai_client: Any) -> None:
    openai = client_library("openai")
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    stream = await openai_client.chat.completions.create(model="tiny", messages=HI, stream=True)
    seen = [await anext(stream) for _ in range(2)]
    assert seen[1].choices[0].delta.content
    api.ring.refuse(api.ring.added[-1].request_id, 500, "The row broke.")
    with pytest.raises(openai.APIError, match="The row broke"):
        async for _ in stream:
            pass


async def test_openai_hang_up(api: Api, openai_client: Any) -> None:
    api.ring.script = lambda add: api.ring.token(add.request_id, "ab")
    stream = await openai_client.chat.completions.create(model="tiny", messages=HI, stream=True)
    await anext(stream)
    await stream.close()
    await api.ring.until(lambda: api.ring.aborted)


async def test_openai_responses(api: Api, openai_client: Any) -> None:
    script_text(api, "hello", is_eos=True)
    answer = await openai_client.responses.create(model="tiny", input="hi", instructions="be kind", max_output_tokens=9)
    assert answer.output_text == "hello" and answer.status == "completed" and answer.usage.output_tokens == 5
    assert bytes(prompt_of(api.ring.added[-1])) == b"<system>be kind<user>hi<assistant>"
    script_text(api, "hello", FinishReason.LENGTH)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]
    events = [event async for event in await openai_client.responses.create(model="tiny", input=items, stream=True)]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hello"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.incomplete_details.reason == "max_output_tokens"
    openai = client_library("openai")
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        await openai_client.responses.create(model="tiny", input="hi", previous_response_id="resp_1")


async def test_anthropic_messages(api: Api) -> None:
    anthropic = client_library("anthropic")
    async with anthropic.AsyncAnthropic(base_url=api.url, api_key="none", max_retries=0) as client:
        script_text(api, "hello", is_eos=True)
        answer = await client.messages.create(model="tiny", max_tokens=9, messages=HI, system="be kind")
        assert (answer.content[0].text, answer.stop_reason, answer.usage.output_tokens) == ("hello", "end_turn", 5)
        assert bytes(prompt_of(api.ring.added[-1])) == b"<system>be kind<user>hi<assistant>"
        script_text(api, "hel", stop_string="lo")
        async with client.messages.stream(model="tiny", max_tokens=9, messages=HI, stop_sequences=["lo"]) as stream:
            assert "".join([text async for text in stream.text_stream]) == "hel"
            final = await stream.get_final_message()
        assert (final.stop_reason, final.stop_sequence, final.usage.output_tokens) == ("stop_sequence", "lo", 3)
        counted = await client.messages.count_tokens(model="tiny", messages=HI)
        assert counted.input_tokens == len("<user>hi<assistant>")
        prefilled = [*HI, {"role": "assistant", "content": "Sure"}]
        await client.messages.create(model="tiny", max_tokens=9, messages=prefilled)
        assert bytes(prompt_of(api.ring.added[-1])) == b"<user>hi<assistant>Sure"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await client.messages.create(model="other", max_tokens=9, messages=HI)
        assert missing.value.body["type"] == "error"
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.create(model="tiny", max_tokens=9, messages=[])


async def test_langchain(api: Api) -> None:
    chat = client_library("langchain_openai").ChatOpenAI(model="tiny", base_url=api.url + "/v1", api_key="none")
    script_text(api, "hello", is_eos=True)
    assert (await chat.ainvoke("hi")).content == "hello"
    assert "".join([str(chunk.content) async for chunk in chat.astream("hi")]) == "hello"


async def test_litellm(api: Api) -> None:
    litellm = client_library("litellm")
    script_text(api, "hello", is_eos=True)
    target = {"model": "openai/tiny", "api_base": api.url + "/v1", "api_key": "none", "messages": HI}
    answer = await litellm.acompletion(**target)
    assert answer.choices[0].message.content == "hello"
    parts = [chunk.choices[0].delta.content or "" async for chunk in await litellm.acompletion(**target, stream=True)]
    assert "".join(parts) == "hello"


async def test_curl(api: Api) -> None:
    script_text(api, "hello", is_eos=True)
    arguments = ["-sN", api.url + "/v1/completions", "-H", "Content-Type: application/json"]
    process = await asyncio.create_subprocess_exec(
        "curl", *arguments, "-d", '{"prompt": "x", "stream": true}', stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.endswith(b"data: [DONE]\n\n") and process.returncode == 0
