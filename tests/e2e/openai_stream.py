"""Asks for the same thing unary and streamed, checks the stream's grammar, and that both say the same."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tests.e2e.harness import Server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass
class Answer:
    """One choice's answer, or several; the same whether it was streamed."""

    texts: list[str]
    reasons: list[str]
    stop_reasons: list[Any]
    usage: dict[str, Any]
    logprobs: list[Any]
    num_content_events: int = 0

    @property
    def text(self) -> str:
        assert len(self.texts) == 1
        return self.texts[0]

    @property
    def reason(self) -> str:
        assert len(self.reasons) == 1
        return self.reasons[0]


def ask(server: Server, body: dict[str, Any], path: str = COMPLETIONS) -> Answer:
    """Unary and streamed; AssertionError unless text, reasons, usage and logprobs agree."""
    unary = ask_unary(server, body, path)
    streamed = ask_streamed(server, body, path)
    assert streamed.texts == unary.texts
    assert streamed.reasons == unary.reasons and streamed.stop_reasons == unary.stop_reasons
    # what the prefix cache had may differ between two requests; the numbers of tokens may not
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert streamed.usage[key] == unary.usage[key]
    assert streamed.logprobs == unary.logprobs
    unary.num_content_events = streamed.num_content_events
    return unary


def ask_unary(server: Server, body: dict[str, Any], path: str = COMPLETIONS) -> Answer:
    status, answer = server.post(path, body)
    assert status == 200, answer
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    return Answer(
        texts=texts,
        reasons=[choice["finish_reason"] for choice in choices],
        stop_reasons=[choice["stop_reason"] for choice in choices],
        usage=answer["usage"],
        logprobs=[choice["logprobs"] for choice in choices],
    )


def ask_streamed(server: Server, body: dict[str, Any], path: str = COMPLETIONS) -> Answer:
    """The stream put together; checks roles, one finish per choice, one usage chunk, one terminator."""
    events = list(server.stream(path, {**body, "stream_options": {"include_usage": True}}))
    assert events.pop() == "[DONE]"
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    usage_chunk = chunks.pop()
    assert usage_chunk["choices"] == [] and all(len(chunk["choices"]) == 1 for chunk in chunks)
    parts: dict[int, Answer] = {}
    for chunk in chunks:
        assert "usage" not in chunk
        choice = chunk["choices"][0]
        index = choice["index"]
        if path == CHAT:
            delta = choice["delta"]
            assert ("role" in delta) == (index not in parts)  # once per choice, first
        part = parts.setdefault(index, Answer([], [], [], {}, []))
        assert not part.reasons, "an event after the finish"
        text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
        if choice["finish_reason"] is not None:
            assert text == ""
            part.reasons.append(choice["finish_reason"])
            part.stop_reasons.append(choice["stop_reason"])
        else:
            assert text or choice["logprobs"] or "role" in choice["delta"]
        part.texts.append(text)
        part.num_content_events += bool(text)
        if choice["logprobs"] is not None:
            part.logprobs.append(choice["logprobs"])
    assert sorted(parts) == list(range(len(parts)))
    ordered = [parts[index] for index in range(len(parts))]
    assert all(len(part.reasons) == 1 for part in ordered)
    return Answer(
        texts=["".join(part.texts) for part in ordered],
        reasons=[part.reasons[0] for part in ordered],
        stop_reasons=[part.stop_reasons[0] for part in ordered],
        usage=usage_chunk["usage"],
        logprobs=[_joined(part.logprobs) for part in ordered],
        num_content_events=sum(part.num_content_events for part in ordered),
    )


def _joined(logprobs: list[dict[str, list[Any]]]) -> Any:
    if not logprobs:
        return None
    return {key: [entry for part in logprobs for entry in part[key]] for key in logprobs[0]}
