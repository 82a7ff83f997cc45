"""Asks for the same thing unary and streamed, checks the stream's grammar, and that both say the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.e2e.harness import Server
from tests.sse_grammar import ChunkChecker, Event

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
    """The stream put together, its grammar checked: roles, one finish per choice, one usage chunk, one terminator."""
    prompts = body.get("prompt")
    num_prompts = len(prompts) if isinstance(prompts, list) and not isinstance(prompts[0], int) else 1
    num_choices = num_prompts * (body.get("n") or 1)
    checker = ChunkChecker(chat=path == CHAT, include_usage=True, num_choices=num_choices)
    for data in server.stream(path, {**body, "stream_options": {"include_usage": True}}):
        checker.feed(Event(data))
    checker.close()
    assert checker.error is None and checker.usage is not None
    choices = checker.choices
    return Answer(
        texts=[choice.text for choice in choices],
        reasons=[choice.reason or "" for choice in choices],
        stop_reasons=[choice.stop_reason for choice in choices],
        usage=checker.usage,
        logprobs=[_joined(choice.logprobs) for choice in choices],
        num_content_events=sum(choice.num_content_events for choice in choices),
    )


def _joined(logprobs: list[dict[str, list[Any]]]) -> Any:
    if not logprobs:
        return None
    return {key: [entry for part in logprobs for entry in part[key]] for key in logprobs[0]}
