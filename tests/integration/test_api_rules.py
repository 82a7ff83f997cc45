"""Rules of the api process that hold on every path: labels, idle connections, threads, lengths that nobody gave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tokenizers import Tokenizer, processors

from nanoserve.api import access, model
from nanoserve.api.access import Access
from nanoserve.api.chat_template import ChatTemplate
from nanoserve.api.encoding import Encoder
from nanoserve.config import ApiConfig, ServerConfig
from nanoserve.errors import RequestError
from nanoserve.tokenizer import load_tokenizer
from tests.integration.api_ring import BOS, CONTEXT, Api, loaded_api, prompt_of, running_api, write_model
from tests.sse_grammar import SseParser, check_error

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
# Every path that takes text or gives it.
TEXTS: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": ["hi", "you"], "max_tokens": 2, "echo": True}),
    (COMPLETIONS, {"prompt": [104, 105], "max_tokens": 2, "echo": True, "bad_words": ["no"]}),
    (CHAT, {"messages": HI, "max_tokens": 2}),
    ("/v1/chat/completions/render", {"messages": HI}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 2}}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/tokenize", {"messages": HI}),
    ("/v1/detokenize", {"tokens": [104, 105]}),
]


# ---- nothing dear on the event loop -------------------------------------------------------------------------


def off_the_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which fails where an event loop runs in the same thread."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return guarded


calls: list[str] = []


class ThreadsOnly:
    """A tokenizer whose work is refused on the event loop."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tokenizer, name)
        work = ("encode", "encode_batch", "decode", "decode_batch", "id_to_token")
        return off_the_loop(value) if name in work else value


@pytest.mark.rule(22, 18)
@pytest.mark.parametrize(("path", "body"), TEXTS, ids=lambda value: value if isinstance(value, str) else "")
async def test_no_text_is_encoded_decoded_or_rendered_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    monkeypatch.setattr(model, "load_tokenizer", lambda path: ThreadsOnly(load_tokenizer(path)))
    monkeypatch.setattr(ChatTemplate, "render", off_the_loop(ChatTemplate.render))
    async with loaded_api(tmp_path) as api:
        calls.clear()
        status, answer = await api.post(path, body)
        assert status == 200, answer
        assert calls  # by a thread, or this test tests nothing


@pytest.mark.rule(22, 26)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "x" * 100_000}),
        (COMPLETIONS, {"prompt": ["x", "x" * 100_000], "stream": True}),
        ("/generate", {"text": "x" * 100_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}),
    ],
)
async def test_what_is_too_long_by_its_bytes_is_not_encoded(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    async def encode(*_: object, **__: object) -> list[list[int]]:
        raise AssertionError("encoded for nothing")

    monkeypatch.setattr(Encoder, "encode", encode)
    status, answer = await api.post(path, body)
    assert status == 400 and f"maximum context length is {CONTEXT} tokens" in answer["error"]["message"]
    assert len(api.ring.added) == 1  # the warm-up alone


# ---- limits before work -------------------------------------------------------------------------------------


@pytest.mark.rule(8)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/generate", "/v1/messages", "/v1/responses"])
async def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr("nanoserve.api.edge._LINGER_S", 0.05)  # the rest of the body never comes
    async with loaded_api(tmp_path, ServerConfig(api=ApiConfig(max_body_bytes=1000, body_timeout=0))) as api:
        reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(api.url).port)
        head = "POST {} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n"
        writer.write(head.format(path).encode())  # and not one byte of the body
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
        assert answer.startswith(b"HTTP/1.1 413")
        assert await asyncio.wait_for(reader.read(), 10) == b""  # closed: what would come next is no request
        writer.close()


# ---- labels, keys, connections ------------------------------------------------------------------------------


@pytest.mark.rule(15)
@pytest.mark.parametrize("label", ["x" * 129, "two words", "\u00e4", ""])
async def test_a_label_that_is_long_or_not_printable_is_replaced(api: Api, label: str) -> None:
    async with api.http.get(api.url + "/version", headers={"X-Request-Id": label}) as response:
        given = response.headers.getall("X-Request-Id")
        assert len(given) == 1 and given[0] != label and len(given[0]) == 16


@pytest.mark.rule(15)
async def test_one_label_makes_as_many_requests_as_it_comes_with(api: Api) -> None:
    body = {"prompt": "x", "max_tokens": 1, "request_id": "same", "rid": "same"}
    for _ in range(3):
        assert (await api.post(COMPLETIONS, body, X_Request_Id="same"))[0] == 200
    ids = {add.request_id for add in api.ring.added}
    assert len(ids) == 4 and api.process.context.client.num_live == 0


@pytest.mark.rule(19)
def test_every_key_is_compared_whole_whatever_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return given == key

    monkeypatch.setattr(access.hmac, "compare_digest", compare)
    guard = Access(ApiConfig(api_key=("one", "two", "three")))
    guard.check("/v1/models", {"Authorization": "Bearer one"})
    with pytest.raises(RequestError):
        guard.check("/v1/models", {"Authorization": "Bearer four"})
    assert sorted(compared) == sorted([b"one", b"two", b"three"] * 2)


@pytest.mark.rule(16)
@pytest.mark.parametrize("stream", [False, True])
async def test_idle_connections_are_kept_for_the_configured_time_also_after_a_stream(
    tmp_path: Path, stream: bool
) -> None:
    assert ServerConfig().api.http_keep_alive >= 75
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": stream}).encode()
    head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    for keep_s, stays in ((75.0, True), (0.1, False)):
        async with loaded_api(tmp_path, ServerConfig(api=ApiConfig(http_keep_alive=keep_s))) as api:
            reader, writer = await asyncio.open_connection("127.0.0.1", urlsplit(api.url).port)
            writer.write(head % (COMPLETIONS.encode(), len(body)) + body)
            await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n" if stream else b"}}"), 10)
            if stays:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(reader.read(), 0.5)
            else:
                await asyncio.wait_for(reader.read(), 10)  # ends: the server has closed it
            writer.close()


# ---- words ---------------------------------------------------------------------------------------------------


@pytest.mark.rule(20)
async def test_without_a_template_chat_alone_is_refused(tmp_path: Path) -> None:
    async with loaded_api(tmp_path, template=None) as api:
        for path, body in TEXTS:
            has_chat = "messages" in body or path == "/v1/responses"
            status, answer = await api.post(path, body)
            assert status == (400 if has_chat else 200), (path, answer)
            if path == CHAT:
                check_error(answer)
                assert "chat template" in answer["error"]["message"] and answer["error"]["param"] == "messages"


@pytest.mark.rule(21)
async def test_a_chat_gets_no_begin_token_besides_its_templates_own(tmp_path: Path) -> None:
    """The tokenizer adds one to plain texts."""
    write_model(tmp_path, template="<bos>{% for m in messages %}{{ m.content }}{% endfor %}")
    path = str(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(path)
    async with running_api() as api:
        api.load(tmp_path)
        await api.until_ready()
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})):
            _, answer = await api.post(path, {**body, "max_tokens": 1})
            assert prompt_of(api.ring.added[-1]) == [BOS, *b"hi"]
            assert answer["usage"]["prompt_tokens"] == 3
        for body, ids in (({"prompt": "hi"}, [BOS, *b"hi"]), ({"messages": HI}, [BOS, *b"hi"])):
            assert (await api.post("/tokenize", body))[1]["tokens"] == ids


# ---- lengths -------------------------------------------------------------------------------------------------


@pytest.mark.rule(28)
@pytest.mark.parametrize("stream", [False, True])
async def test_lengths_that_nobody_gave(api: Api, stream: bool) -> None:
    async def granted(path: str, body: dict[str, Any]) -> int:
        if stream:
            await api.events(path, body)
        else:
            assert (await api.post(path, body))[0] == 200
        return api.ring.added[-1].sampling.max_tokens

    chat_length = len("<user>hi<assistant>")
    assert await granted(COMPLETIONS, {"prompt": "hi"}) == 16
    assert await granted(CHAT, {"messages": HI}) == CONTEXT - chat_length
    assert await granted(CHAT, {"messages": HI, "max_completion_tokens": 5}) == 5
    assert await granted(CHAT, {"messages": HI, "max_completion_tokens": 10_000}) == CONTEXT - chat_length
    for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": HI})):
        assert (await api.post(path, {**body, "max_tokens": 0, "stream": stream}))[0] == 400


@pytest.mark.rule(28)
async def test_echo_without_tokens_is_the_prompt(api: Api) -> None:
    body = {"prompt": "hi", "max_tokens": 0, "echo": True}
    choice = (await api.post(COMPLETIONS, body))[1]["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "length")
    events = await api.events(COMPLETIONS, body)
    assert "".join(event["choices"][0]["text"] for event in events) == "hi"


# ---- streams -------------------------------------------------------------------------------------------------


@pytest.mark.rule(72)
async def test_a_stream_is_never_compressed_and_tells_proxies_not_to_wait(api: Api) -> None:
    for path, body in TEXTS:
        if path in (COMPLETIONS, CHAT, "/generate", "/v1/responses", "/v1/messages"):
            headers = {"Accept-Encoding": "gzip, deflate, br"}
            async with api.http.post(api.url + path, json={**body, "stream": True}, headers=headers) as response:
                assert response.status == 200 and "Content-Encoding" not in response.headers
                assert response.headers["X-Accel-Buffering"] == "no"
                assert response.headers["Cache-Control"] == "no-cache"
                named = path in ("/v1/responses", "/v1/messages")
                parser = SseParser(named=named)
                assert parser.feed(await response.read())
                parser.close()
