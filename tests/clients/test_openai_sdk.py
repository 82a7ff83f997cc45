"""The `openai` package: sync, async, streams, raw responses, and errors as its own exception classes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.clients.conftest import library
from tests.conftest import StartServer
from tests.e2e.harness import Server
from tests.forced import DAY, FIRE, SEMICOLON, TWO, YES, force
from tests.sse_grammar import read_stream

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

MODEL = "smollm2-135m"
HI: Any = [{"role": "user", "content": "Hi"}]
LONG: Any = [{"role": "user", "content": "Write about the sea."}]


def connect(server: Server, **options: Any) -> Any:
    options = {"api_key": "none", "max_retries": 0, "timeout": 120.0, **options}
    return library("openai").OpenAI(base_url=server.base_url + "/v1", **options)


def connect_async(server: Server, **options: Any) -> Any:
    options = {"api_key": "none", "max_retries": 0, "timeout": 120.0, **options}
    return library("openai").AsyncOpenAI(base_url=server.base_url + "/v1", **options)


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with connect(server) as client:
        yield client


def test_models(client: Any, server: Server) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.max_model_len) == (MODEL, "model", 2048)
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(library("openai").NotFoundError):
        client.models.retrieve("other")


def test_completion(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="Go", max_tokens=4, temperature=0, **force(YES), stop=["no"], user="me"
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.index) == (" yes yes yes yes", "length", 0)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-") and answer.model == MODEL
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (1, 4, 5)


def test_chat_sync_async_and_streams_say_the_same(client: Any, server: Server) -> None:
    fields: Any = {"model": MODEL, "messages": LONG, "max_tokens": 12, "temperature": 0}
    unary = client.chat.completions.create(**fields).choices[0].message
    assert unary.role == "assistant" and unary.content
    chunks = list(client.chat.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == unary.content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks)

    async def ask() -> tuple[str, str]:
        async with connect_async(server) as other:
            once = await other.chat.completions.create(**fields)
            parts = [chunk async for chunk in await other.chat.completions.create(**fields, stream=True)]
            return once.choices[0].message.content, "".join(part.choices[0].delta.content or "" for part in parts)

    assert asyncio.run(ask()) == (unary.content, unary.content)


def test_the_accumulating_stream_helper(client: Any) -> None:
    """The SDK puts the answer together itself; it refuses one that was cut by its length."""
    fields: Any = {"model": MODEL, "messages": HI, "max_tokens": 9, "temperature": 0, **force(TWO)}
    ended = {"stop": ["two"], "extra_body": {"min_tokens": 4}, "stream_options": {"include_usage": True}}
    with client.chat.completions.stream(**fields, **ended) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "".join(deltas) == " two two two two "
    assert final.usage.completion_tokens == 5 and final.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**fields) as stream, pytest.raises(library("openai").LengthFinishReasonError):
        stream.get_final_completion()


def test_stream_usage(client: Any) -> None:
    fields: Any = {"model": MODEL, "prompt": "Go", "max_tokens": 6, "temperature": 0, **force(DAY), "stream": True}
    *chunks, last = client.completions.create(**fields, stream_options={"include_usage": True})
    assert all(chunk.usage is None for chunk in chunks) and last.choices == []
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.total_tokens) == (1, 6, 7)
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in client.completions.create(**fields, stream_options=options)]
    assert counts == sorted(counts) and counts[-1] == 6


def test_raw_and_streaming_responses(client: Any) -> None:
    fields: Any = {"model": MODEL, "messages": HI, "max_tokens": 3, "temperature": 0, **force(YES)}
    headers = {"X-Request-Id": "my-own-1"}
    raw = client.chat.completions.with_raw_response.create(**fields, extra_headers=headers)
    assert raw.status_code == 200 and raw.headers["x-request-id"] == "my-own-1" and raw.request_id == "my-own-1"
    assert raw.parse().choices[0].message.content == " yes yes yes"
    with client.chat.completions.with_streaming_response.create(**fields, stream=True) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-accel-buffering"] == "no" and "content-encoding" not in response.headers
        data = b"".join(response.iter_bytes())
    assert read_stream(data, chat=True).choices[0].text == " yes yes yes"


def test_several_choices(client: Any) -> None:
    fields: Any = {"model": MODEL, "temperature": 1, "max_tokens": 3, "n": 3, **force(DAY)}
    answer = client.chat.completions.create(messages=HI, **fields)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [
        (i, " day day day") for i in range(3)
    ]
    assert answer.usage.completion_tokens == 9
    answer = client.completions.create(prompt=["a b", "c d e"], echo=True, **fields)
    assert [choice.text for choice in answer.choices] == ["a b day day day"] * 3 + ["c d e day day day"] * 3
    texts = [""] * 3
    for chunk in client.chat.completions.create(messages=HI, **fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [" day day day"] * 3


@pytest.mark.rule(37)
def test_a_seed_repeats_and_samples_differ(client: Any) -> None:
    fields: Any = {"model": MODEL, "messages": LONG, "max_tokens": 12, "temperature": 1.5, "n": 2}
    first, again = (
        [choice.message.content for choice in client.chat.completions.create(**fields, seed=7).choices]
        for _ in range(2)
    )
    assert first == again and first[0] != first[1]


@pytest.mark.parametrize(("stop", "text"), [("es ye", " y"), (["zz", "s"], " ye")])
def test_stop_strings(client: Any, stop: Any, text: str) -> None:
    fields: Any = {"model": MODEL, "prompt": "Go", "max_tokens": 12, "temperature": 0, **force(YES), "stop": stop}
    choice = client.completions.create(**fields).choices[0]
    assert (choice.text, choice.finish_reason) == (text, "stop")
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_logprobs(client: Any) -> None:
    fields: Any = {"model": MODEL, "max_tokens": 9, "temperature": 0, **force(*FIRE)}
    messages: Any = [{"role": "user", "content": "🔥" * 20}]
    answer = client.chat.completions.create(messages=messages, **fields, logprobs=True, top_logprobs=2)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == 9 and all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    text = b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace")
    assert text.rstrip("�") == answer.choices[0].message.content.rstrip("�")
    fields = {"model": MODEL, "prompt": "Good day", "max_tokens": 2, "temperature": 0, **force(DAY)}
    shown = client.completions.create(**fields, logprobs=1, echo=True).choices[0].logprobs
    assert "".join(shown.tokens) == "Good day day day" and shown.text_offset == [0, 4, 8, 12]
    assert shown.token_logprobs[0] is None and shown.top_logprobs[1]


def test_responses_api(client: Any) -> None:
    fields: Any = {"model": MODEL, "input": "Write about the sea.", "max_output_tokens": 12, "temperature": 0}
    answer = client.responses.create(**fields)
    chat = client.chat.completions.create(model=MODEL, messages=LONG, max_tokens=12, temperature=0)
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(**fields) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "other"}, "NotFoundError", "model"),
        ({"temperature": 3}, "BadRequestError", "temperature"),
        ({"messages": []}, "BadRequestError", "messages"),
        ({"max_tokens": 4096}, "BadRequestError", None),
        ({"logit_bias": {"49152": 1}}, "BadRequestError", "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "BadRequestError", "response_format"),
        ({"extra_headers": {"Content-Type": "text/plain"}}, "BadRequestError", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_are_exceptions_before_any_chunk(
    client: Any, fields: dict[str, Any], error: str, param: str | None, stream: bool
) -> None:
    with pytest.raises(getattr(library("openai"), error)) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": HI, "max_tokens": 2, **fields}, stream=stream)
    assert raised.value.message and raised.value.request_id
    if param:
        assert raised.value.param == param


def test_keys_overload_and_size_have_their_own_exceptions(start_server: StartServer) -> None:
    openai = library("openai")
    server = start_server(
        *("sim", "--api-key", "secret", "--max-num-seqs", "1", "--max-num-queued", "1", "--sim-step-ms", "20"),
        *("--overload-status", "429", "--max-body-bytes", "100k"),
    )
    fields: Any = {"model": "sim", "prompt": "a b", "max_tokens": 500, "stream": True}
    with connect(server) as stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()
    with connect(server, api_key="secret") as client:
        assert client.models.list().data
        with pytest.raises(openai.APIStatusError) as raised:
            client.completions.create(**{**fields, "prompt": "x" * 200_000})
        assert raised.value.status_code == 413
        streams = [client.completions.create(**fields) for _ in range(1)]
        next(iter(streams[0]))
        waiting = asyncio.run(_overload(server, fields))
        assert isinstance(waiting, openai.RateLimitError) and int(waiting.response.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()


async def _overload(server: Server, fields: dict[str, Any]) -> Any:
    """One runs, one waits; the error that the third gets."""
    async with connect_async(server, api_key="secret") as client:
        second = asyncio.create_task(client.completions.create(**fields))
        await asyncio.sleep(0.3)
        try:
            await client.completions.create(**fields)
        except Exception as error:
            return error
        finally:
            second.cancel()
            await asyncio.gather(second, return_exceptions=True)
    return None


def test_sixteen_async_streams_are_each_exact(server: Server) -> None:
    tokens = [(YES, " yes"), (TWO, " two"), (DAY, " day"), (SEMICOLON, " ;")] * 4

    async def read(client: Any, token_id: int) -> str:
        stream = await client.completions.create(
            model=MODEL, prompt="Go", max_tokens=12, temperature=0, stream=True, **force(token_id)
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def read_all() -> list[str]:
        async with connect_async(server) as client:
            return await asyncio.gather(*(read(client, token_id) for token_id, _ in tokens))

    assert asyncio.run(read_all()) == [text * 12 for _, text in tokens]


def _generated(server: Server) -> float:
    lines = server.get("/metrics")[1].splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("nanoserve_generation_tokens_total "))


@pytest.mark.rule(73)
def test_closing_a_stream_stops_the_work(client: Any, server: Server) -> None:
    """Seen by the tokens made afterwards, not by the end state."""
    before = _generated(server)
    stream = client.completions.create(
        model=MODEL, prompt="Go", max_tokens=1500, temperature=0, stream=True, **force(YES)
    )
    events: Callable[[], Any] = iter(stream).__next__
    for _ in range(3):
        events()
    stream.close()
    time.sleep(1.0)  # the figures come with the engine's next message
    assert client.completions.create(model=MODEL, prompt="Go", max_tokens=1).usage.completion_tokens == 1
    assert _generated(server) - before < 200
