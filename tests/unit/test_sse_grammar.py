"""The checker of streams itself: what is right passes in pieces of any size, and each wrong thing is caught."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.api import sse
from tests.sse_grammar import ChunkChecker, SseParser, read_stream


def chat_stream() -> bytes:
    frames = sse.ChatFrames(response_id="id", created=1, model="m")
    parts = [frames.role(0), frames.content(0, "a\nb"), sse.comment("keep-alive"), frames.content(0, "🔥")]
    ending: Any = {"finish_reason": "stop", "stop_reason": None}
    return b"".join([*parts, frames.finish(0, ending), frames.usage({"total_tokens": 3}), sse.DONE])


@pytest.mark.rule(66)
@given(st.integers(1, 80))
def test_our_own_frames_pass_in_pieces_of_any_size(size: int) -> None:
    data = chat_stream()
    parser, checker = SseParser(), ChunkChecker(chat=True, include_usage=True)
    for start in range(0, len(data), size):
        for event in parser.feed(data[start : start + size]):
            checker.feed(event)
    parser.close()
    checker.close()
    assert checker.choices[0].text == "a\nb🔥" and parser.comments == ["keep-alive"]


@pytest.mark.rule(66)
@pytest.mark.parametrize(
    "data",
    [
        b'data: {"a": 1}\n\n',  # no terminator
        b"data: [DONE]\n\ndata: [DONE]\n\n",
        b"data: [DONE]\n\n\n",
        b"data: \n\ndata: [DONE]\n\n",
        b"data: {}\n\ndata: [DONE]\n\n",
        b"data: [1]\n\ndata: [DONE]\n\n",
        b"data:{}\n\ndata: [DONE]\n\n",
        b'data: {"a": NaN}\n\ndata: [DONE]\n\n',
        b'data: {"a": 1, "a": 1}\n\ndata: [DONE]\n\n',
        b'data: {"a": "\\ud800"}\n\ndata: [DONE]\n\n',
        b'data: {"a": "\xff"}\n\ndata: [DONE]\n\n',
        b'data: {"a": 1}\ndata: {"b": 1}\n\ndata: [DONE]\n\n',
        b'event: x\ndata: {"a": 1}\n\ndata: [DONE]\n\n',
        b"event: x\n\ndata: [DONE]\n\n",
        b"data: [DONE]\r\n\r\n",
        b'data: {"a": 1}\n',
        b'id: s:2\ndata: {"a": 1}\n\nid: s:1\ndata: [DONE]\n\n',
        b'id: s:2\ndata: {"a": 1}\n\nid: s:2\ndata: [DONE]\n\n',
        b'id: s:1\ndata: {"a": 1}\n\nid: t:2\ndata: [DONE]\n\n',
        b'id: s\ndata: {"a": 1}\n\ndata: [DONE]\n\n',
        b"hello",
    ],
)
def test_what_is_no_stream_is_caught(data: bytes) -> None:
    with pytest.raises((AssertionError, ValueError)):
        parser = SseParser()
        parser.feed(data)
        parser.close()


HEAD = {"id": "i", "object": "text_completion", "created": 1, "model": "m"}
TEXT = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
FINISH = {"index": 0, "text": "", "logprobs": None, "finish_reason": "length", "stop_reason": None}
USAGE = {**HEAD, "choices": [], "usage": {"total_tokens": 1}}


def stream_of(*choices: dict[str, Any], more: tuple[dict[str, Any], ...] = ()) -> bytes:
    chunks = [{**HEAD, "choices": [choice]} for choice in choices] + list(more)
    return b"".join(sse.event(chunk) for chunk in chunks) + sse.DONE


def test_right_chunks_pass() -> None:
    assert read_stream(stream_of(TEXT, FINISH), chat=False).choices[0].text == "a"
    assert read_stream(stream_of(TEXT, FINISH, more=(USAGE,)), chat=False, include_usage=True).usage is not None


@pytest.mark.rule(67, 68)
@pytest.mark.parametrize(
    ("data", "options"),
    [
        (stream_of(TEXT), {}),  # no finish
        (stream_of(TEXT, FINISH, FINISH), {}),
        (stream_of(TEXT, FINISH, TEXT), {}),
        (stream_of(TEXT, {**FINISH, "text": "b"}), {}),
        (stream_of({**TEXT, "text": ""}, FINISH), {}),
        (stream_of(TEXT, FINISH), {"num_choices": 2}),
        (stream_of(TEXT, FINISH), {"include_usage": True}),
        (stream_of(TEXT, FINISH, more=(USAGE,)), {}),
        (stream_of(TEXT, FINISH, more=(USAGE, USAGE)), {"include_usage": True}),
        (stream_of(TEXT, FINISH, more=({**HEAD, "id": "j", "choices": [TEXT]},)), {}),
        (stream_of({"index": 0, "text": "a"}, FINISH), {}),
        (stream_of(TEXT, FINISH, more=({"error": {"message": "x"}},)), {}),
    ],
)
def test_wrong_chunks_are_caught(data: bytes, options: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, KeyError)):
        read_stream(data, chat=False, **options)


@pytest.mark.rule(70)
def test_an_error_is_the_last_event() -> None:
    error = {"error": {"message": "x", "type": "t", "param": None, "code": 503}}
    checker = read_stream(stream_of(TEXT, more=(error,)), chat=False)
    assert checker.error == json.loads(json.dumps(error["error"]))
