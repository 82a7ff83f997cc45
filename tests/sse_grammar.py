"""What a stream of ours may look like, byte by byte and chunk by chunk. Every streaming test reads through this.

`SseParser` is the transport: events and comments and nothing else. `ChunkChecker` is what OpenAI's two endpoints say in
it. Both raise AssertionError at the first byte that does not belong there. No sockets: feed them what was read.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
_LINE = re.compile(r"(event|id|data): (.+)")
_REASONS = {"stop", "length", "abort", "tool_calls", "content_filter"}


@dataclass(frozen=True, slots=True)
class Event:
    """One event: the payload of its one `data:` line, and its name and id where the stream has them."""

    data: str
    name: str | None = None
    id: str | None = None

    @property
    def json(self) -> dict[str, Any]:
        return load_object(self.data)


def load_object(text: str) -> dict[str, Any]:
    """The one JSON object in `text`; no NaN, no key twice, no half of a surrogate pair."""
    value = json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=_no_constant)
    assert isinstance(value, dict), f"not an object: {text[:200]}"
    json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    assert len(keys) == len(set(keys)), f"a key twice: {keys}"
    return dict(pairs)


def _no_constant(word: str) -> Any:
    raise AssertionError(f"{word} is not JSON")


class SseParser:
    """Takes the body of a stream in pieces of any size. `named` streams end by closing, the others with `[DONE]`."""

    def __init__(self, *, named: bool = False) -> None:
        self.comments: list[str] = []
        self.is_done = False
        self._named = named
        self._rest = b""
        self._last_id = ("", -1)

    def feed(self, data: bytes) -> list[Event]:
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        assert not self._rest.startswith(b"\n"), "an empty line too many"
        return [event for block in blocks if (event := self._block(block.decode())) is not None]

    def close(self) -> None:
        """The body has ended."""
        assert not self._rest, f"the stream ends inside an event: {self._rest[:200]!r}"
        assert self.is_done or self._named, "the stream ends without [DONE]"

    def _block(self, block: str) -> Event | None:
        assert not self.is_done, f"something after [DONE]: {block[:200]}"
        assert block and "\r" not in block and "\0" not in block, f"not an event: {block[:200]!r}"
        if block.startswith(":"):
            assert "\n" not in block and block.startswith(": "), f"not a comment: {block[:200]}"
            self.comments.append(block[2:])
            return None
        fields: dict[str, str] = {}
        for line in block.split("\n"):
            match = _LINE.fullmatch(line)
            assert match is not None and match[1] not in fields, f"not an event: {block[:200]}"
            fields[match[1]] = match[2]
        assert "data" in fields and ("event" in fields) == self._named, f"not an event: {block[:200]}"
        event = Event(fields["data"], fields.get("event"), fields.get("id"))
        if event.id is not None:
            name, _, number = event.id.rpartition(":")
            assert number.isdigit() and self._last_id[0] in ("", name), f"not an id of this stream: {event.id}"
            assert int(number) > self._last_id[1], f"ids do not grow: {event.id}"
            self._last_id = (name, int(number))
        if event.data == DONE and not self._named:
            self.is_done = True
        else:
            assert load_object(event.data)
        return event


@dataclass
class StreamedChoice:
    """What came of one choice."""

    text: str = ""
    reason: str | None = None
    stop_reason: Any = None
    logprobs: list[dict[str, list[Any]]] = field(default_factory=list)
    num_content_events: int = 0
    has_role: bool = False


class ChunkChecker:
    """The chunks of one stream of /v1/completions or (`chat`) /v1/chat/completions, in order."""

    def __init__(self, *, chat: bool, include_usage: bool = False, num_choices: int = 1) -> None:
        self.choices = [StreamedChoice() for _ in range(num_choices)]
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        self._chat = chat
        self._include_usage = include_usage
        self._head: tuple[Any, ...] | None = None
        self._is_done = False

    def feed(self, event: Event) -> None:
        assert not self._is_done, "something after [DONE]"
        if event.data == DONE:
            self._end()
            return
        chunk = event.json
        assert self.error is None and self.usage is None, f"a chunk after the last one: {event.data[:200]}"
        if "error" in chunk:
            check_error(chunk)
            self.error = chunk["error"]
            return
        head = tuple(chunk[key] for key in ("id", "object", "created", "model"))
        assert self._head in (None, head), "the head of the chunks changes"
        self._head = head
        assert chunk["object"] == ("chat.completion.chunk" if self._chat else "text_completion")
        if chunk["choices"]:
            assert len(chunk["choices"]) == 1 and chunk.get("usage") is None
            self._take(chunk["choices"][0])
        else:
            assert self._include_usage, "usage that nobody asked for"
            assert all(choice.reason for choice in self.choices), "usage before all choices have ended"
            self.usage = chunk["usage"]

    def _take(self, choice: dict[str, Any]) -> None:
        part = self.choices[choice["index"]]
        assert part.reason is None, "an event after the finish"
        assert "finish_reason" in choice and "logprobs" in choice
        text = choice["delta"].get("content", "") if self._chat else choice["text"]
        assert isinstance(text, str)
        if self._chat:
            delta = choice["delta"]
            assert ("role" in delta) is not part.has_role, "the role comes once per choice, and first"
            if "role" in delta:
                part.has_role = True
                assert delta == {"role": "assistant", "content": ""}
                assert choice["finish_reason"] is None
                return
        if choice["finish_reason"] is not None:
            assert choice["finish_reason"] in _REASONS and text == "" and choice["logprobs"] is None
            part.reason, part.stop_reason = choice["finish_reason"], choice["stop_reason"]
            return
        assert text or choice["logprobs"] or "token_ids" in choice, "an event that says nothing"
        part.text += text
        part.num_content_events += bool(text)
        if choice["logprobs"] is not None:
            part.logprobs.append(choice["logprobs"])

    def _end(self) -> None:
        self._is_done = True
        if self.error is not None:
            return
        assert all(choice.reason is not None for choice in self.choices), "not every choice has an end"
        assert (self.usage is not None) == self._include_usage

    def close(self) -> None:
        assert self._is_done, "the stream ends without [DONE]"


def check_error(body: Any) -> None:
    """The one shape of every refusal: bounded, all keys there, an HTTP status as its code."""
    assert set(body) == {"error"}, body
    error = body["error"]
    assert set(error) >= {"message", "type", "param", "code"}, body
    assert isinstance(error["message"], str) and 0 < len(error["message"]) <= 2000
    assert isinstance(error["type"], str) and (error["param"] is None or isinstance(error["param"], str))
    assert isinstance(error["code"], int) and 400 <= error["code"] < 600
    assert error["code"] >= 500 or "engine" not in error["message"].lower(), "a client's mistake is not the engine's"
    assert len(json.dumps(body)) < 8192


def read_stream(data: bytes, **options: Any) -> ChunkChecker:
    """A whole body at once. `options` are those of `ChunkChecker`."""
    parser, checker = SseParser(), ChunkChecker(**options)
    for event in parser.feed(data):
        checker.feed(event)
    parser.close()
    checker.close()
    return checker
