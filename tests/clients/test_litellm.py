"""LiteLLM through its `openai/` and `text-completion-openai/` routes: unary, streams, async, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import library
from tests.e2e.harness import Server
from tests.forced import TWO, YES, force

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    # what it warns of is its own: open clients, its own deprecated calls, serializer notes of its models
    pytest.mark.filterwarnings("ignore"),
]

SEA: Any = [{"role": "user", "content": "Write about the sea."}]


def target(server: Server, model: str = "openai/smollm2-135m", **fields: Any) -> dict[str, Any]:
    where = {"api_base": server.base_url + "/v1", "api_key": "none", "num_retries": 0}
    return {"model": model, **where, "max_tokens": 10, "temperature": 0, **fields}


def test_chat_unary_streamed_and_async_say_the_same(server: Server) -> None:
    litellm = library("litellm")
    answer = litellm.completion(**target(server, messages=SEA))
    text = answer.choices[0].message.content
    assert text and answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 10
    chunks = list(litellm.completion(**target(server, messages=SEA), stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text

    async def ask() -> str:
        stream = await litellm.acompletion(**target(server, messages=SEA), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert asyncio.run(ask()) == text


def test_stream_usage_and_stop(server: Server) -> None:
    litellm = library("litellm")
    fields = target(server, messages=SEA, **force(YES))
    *_, last = litellm.completion(**fields, stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens == 10
    answer = litellm.completion(**fields, stop=["es ye"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (" y", "stop")


def test_text_completion(server: Server) -> None:
    litellm = library("litellm")
    fields = target(server, "text-completion-openai/smollm2-135m", prompt="Go", **force(TWO))
    assert litellm.text_completion(**fields).choices[0].text == " two" * 10
    parts = litellm.text_completion(**fields, stream=True)
    assert "".join(part.choices[0].text or "" for part in parts) == " two" * 10


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "openai/other"}, "NotFoundError"),
        ({"max_tokens": 100_000}, "BadRequestError"),
        ({"temperature": 3}, "BadRequestError"),
    ],
)
def test_errors_are_its_classes(server: Server, fields: dict[str, Any], error: str) -> None:
    litellm = library("litellm")
    with pytest.raises(getattr(litellm, error)):
        litellm.completion(**{**target(server, messages=SEA), **fields})
