"""LangChain's ChatOpenAI and OpenAI: invoke, stream, batch, async, metadata, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.clients.conftest import library
from tests.e2e.harness import Server
from tests.forced import DAY, TWO, YES, force

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # its http clients close when they are collected
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "smollm2-135m"


def make(server: Server, kind: str = "ChatOpenAI", **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 6, "max_retries": 0, **fields}
    return getattr(library("langchain_openai"), kind)(
        model=MODEL, base_url=server.base_url + "/v1", api_key="none", **fields
    )


def test_invoke_stream_and_async_say_the_same(server: Server) -> None:
    chat = make(server, max_tokens=10)
    question = [("system", "You are a poet."), ("human", "Write about the sea.")]
    answer = chat.invoke(question)
    assert answer.text and answer.response_metadata["finish_reason"] == "length"
    assert answer.usage_metadata["output_tokens"] == 10 and answer.response_metadata["model_name"] == MODEL
    assert "".join(chunk.text for chunk in chat.stream(question)) == answer.text

    async def ask() -> list[str]:
        once = await chat.ainvoke(question)
        return [once.text, "".join([chunk.text async for chunk in chat.astream(question)])]

    assert asyncio.run(ask()) == [answer.text] * 2


def test_batch_stop_and_usage_of_streams(server: Server) -> None:
    chat = make(server, logit_bias=force(YES)["logit_bias"])
    assert [answer.text for answer in chat.batch(["a", "b", "c"])] == [" yes" * 6] * 3
    assert chat.invoke("a", stop=["es ye"]).text == " y"
    whole = None
    for chunk in make(server, logit_bias=force(TWO)["logit_bias"], stream_usage=True).stream("a"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.text == " two" * 6 and whole.usage_metadata["output_tokens"] == 6


def test_logprobs(server: Server) -> None:
    answer = make(server, logit_bias=force(DAY)["logit_bias"], logprobs=True, top_logprobs=1).invoke("a")
    entries = answer.response_metadata["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == answer.text == " day" * 6


def test_completions(server: Server) -> None:
    model = make(server, "OpenAI", logit_bias=force(YES)["logit_bias"])
    assert model.invoke("Go") == " yes" * 6 and "".join(model.stream("Go")) == " yes" * 6


def test_errors_are_the_sdks(server: Server) -> None:
    with pytest.raises(library("openai").BadRequestError):
        make(server, temperature=3).invoke("a")
