"""SSE frames: exactly one JSON object per event, heads encoded once, comments and errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.api import sse
from nanoserve.errors import RequestError
from tests.sse_grammar import SseParser


def frames(kind: type[sse.ChatFrames] | type[sse.CompletionFrames]) -> sse.ChatFrames | sse.CompletionFrames:
    return kind(response_id="id-1", created=5, model='m"x', fingerprint="fp_1")


def decode(frame: bytes) -> dict[str, object]:
    (event,) = SseParser().feed(frame)
    return event.json


@pytest.mark.rule(66)
@given(st.text())
def test_any_text_is_one_event_that_gives_it_back(text: str) -> None:
    chat = decode(frames(sse.ChatFrames).content(3, text))
    assert chat["choices"] == [{"index": 3, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]
    completion = decode(frames(sse.CompletionFrames).content(0, text))
    assert completion["choices"] == [{"index": 0, "text": text, "logprobs": None, "finish_reason": None}]
    assert completion["object"] == "text_completion" and completion["model"] == 'm"x'


@pytest.mark.rule(66)
def test_extras_logprobs_and_usage_ride_along() -> None:
    frame = frames(sse.CompletionFrames).content(
        1, "a", logprobs={"tokens": ["a"]}, extras={"token_ids": [7]}, usage={"total_tokens": 3}
    )
    value = decode(frame)
    assert value["usage"] == {"total_tokens": 3}
    assert value["choices"] == [
        {"index": 1, "text": "a", "logprobs": {"tokens": ["a"]}, "finish_reason": None, "token_ids": [7]}
    ]


@pytest.mark.rule(67, 68)
def test_role_finish_and_usage_chunks() -> None:
    chat = frames(sse.ChatFrames)
    assert isinstance(chat, sse.ChatFrames)
    assert decode(chat.role(0))["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert decode(chat.finish(0, {"finish_reason": "stop", "stop_reason": "END"}))["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": "END"}
    ]
    usage = decode(chat.usage({"total_tokens": 1}))
    assert (usage["choices"], usage["usage"]) == ([], {"total_tokens": 1})


@pytest.mark.rule(66)
def test_comment_cannot_be_more_than_one_line() -> None:
    assert sse.comment("a\ndata: evil") == b": a data: evil\n\n"


@pytest.mark.rule(13)
@pytest.mark.parametrize("message", ["plain", "x" * 10_000, 'quote " and \n line'])
def test_error_event_is_the_bounded_envelope(message: str) -> None:
    error = decode(sse.error_event(RequestError(message, status=503, error_type="unavailable_error")))["error"]
    assert isinstance(error, dict)
    assert error["code"] == 503 and len(error["message"]) <= 2000 and message.startswith(error["message"])
