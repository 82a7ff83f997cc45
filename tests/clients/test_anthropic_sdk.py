"""The `anthropic` package on /v1/messages: unary, streams, token counts, errors as its own exception classes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.conftest import library
from tests.conftest import StartServer
from tests.e2e.harness import Server
from tests.sse_grammar import SseParser

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODEL = "smollm2-135m"
SEA: Any = [{"role": "user", "content": "Write about the sea."}]

GREEDY = {"temperature": 0}  # the SDK has no argument for it


def connect(server: Server, **options: Any) -> Any:
    options = {"api_key": "none", "max_retries": 0, "timeout": 120.0, **options}
    return library("anthropic").Anthropic(base_url=server.base_url, **options)


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with connect(server) as client:
        yield client


def chat_text(server: Server, messages: Any, max_tokens: int) -> Any:
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]


def test_unary_says_what_the_chat_route_says(client: Any, server: Server) -> None:
    system = "You are a poet."
    answer = client.messages.create(model=MODEL, max_tokens=10, messages=SEA, system=system, extra_body=GREEDY)
    assert answer.content[0].text == chat_text(server, [{"role": "system", "content": system}, *SEA], 10)
    assert (answer.role, answer.type, answer.stop_reason, answer.model) == ("assistant", "message", "max_tokens", MODEL)
    assert answer.usage.output_tokens == 10
    counted = client.messages.count_tokens(model=MODEL, messages=SEA, system=system).input_tokens
    again = client.messages.create(model=MODEL, max_tokens=1, messages=SEA, system=system)  # from the prefix cache
    assert again.usage.cache_read_input_tokens > 0
    for usage in (answer.usage, again.usage):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_streams_sync_and_async(client: Any, server: Server) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 10, "messages": SEA, "extra_body": GREEDY}
    expected = chat_text(server, SEA, 10)
    with client.messages.stream(**fields) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert "".join(event.text for event in events if event.type == "text") == expected == final.content[0].text
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 10
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"

    async def ask() -> str:
        other = library("anthropic").AsyncAnthropic(base_url=server.base_url, api_key="none", max_retries=0)
        async with other, other.messages.stream(**fields) as stream:
            return "".join([text async for text in stream.text_stream])

    assert asyncio.run(ask()) == expected


def test_stop_sequences(client: Any, server: Server) -> None:
    before, word = chat_text(server, SEA, 10).split(" ")[:2]
    answer = client.messages.create(
        model=MODEL, max_tokens=10, messages=SEA, stop_sequences=["zz", word], extra_body=GREEDY
    )
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == (before + " ", "stop_sequence", word)


def test_the_events_by_name(server: Server) -> None:
    """Each event has its name, its type is the name, and each block begins and ends once."""
    body = {"model": MODEL, "max_tokens": 4, "messages": SEA, "temperature": 0, "stream": True}
    with library("httpx").Client(timeout=120) as http:
        response = http.post(server.base_url + "/v1/messages", json=body)
    parser = SseParser(named=True)
    events = parser.feed(response.content)
    parser.close()
    assert all(event.json["type"] == event.name for event in events)
    names = [event.name for event in events if event.name != "ping"]
    deltas = names.count("content_block_delta")
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert names == ["message_start", "content_block_start", *["content_block_delta"] * deltas, *ends]
    text = "".join(event.json["delta"]["text"] for event in events if event.name == "content_block_delta")
    assert text == chat_text(server, SEA, 4)


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "other"}, "NotFoundError", "not_found_error"),
        ({"messages": []}, "BadRequestError", "invalid_request_error"),
        ({"extra_body": {"temperature": 3}}, "BadRequestError", "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "BadRequestError", None),
    ],
)
def test_refusals(client: Any, fields: dict[str, Any], error: str, kind: str | None) -> None:
    for stream in (False, True):
        with pytest.raises(getattr(library("anthropic"), error)) as raised:
            client.messages.create(**{"model": MODEL, "max_tokens": 2, "messages": SEA, **fields}, stream=stream)
        assert raised.value.body["type"] == "error"
        if kind:
            assert raised.value.body["error"]["type"] == kind


def test_its_key_header_opens_the_server(start_server: StartServer) -> None:
    server = start_server("sim", "--api-key", "secret")
    fields: Any = {"model": "sim", "max_tokens": 3, "messages": SEA}
    with connect(server, api_key="secret") as client:
        assert client.messages.create(**fields).content[0].text
    with connect(server, api_key="wrong") as client, pytest.raises(library("anthropic").AuthenticationError):
        client.messages.create(**fields)
