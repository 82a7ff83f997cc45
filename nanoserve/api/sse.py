"""Server-sent events as OpenAI frames them: bytes in the order a client sees them. Pure.

Owner process: api. `CompletionFrames` and `ChatFrames` encode what stays equal over a stream once; per piece only
the text, its logprobs and ids are encoded. Only `data: <one JSON object>` events and comments exist.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from nanoserve.api.errors import envelope_bytes
from nanoserve.errors import RequestError

Ending = dict[str, Any]  # finish_reason, stop_reason and what else a choice's last chunk has
Around = tuple[bytes, bytes]  # what an event has before and after the JSON of its text
DONE = b"data: [DONE]\n\n"
_END = b"}\n\n"
_encode = msgspec.json.Encoder().encode


def comment(text: str) -> bytes:
    """A line that clients skip and proxies see: it keeps the connection alive."""
    return b": " + text.replace("\n", " ").encode() + b"\n\n"


def error_event(error: RequestError) -> bytes:
    return b"data: " + envelope_bytes(error) + b"\n\n"


def event(payload: Any) -> bytes:
    """One anonymous event."""
    return b"data: " + _encode(payload) + b"\n\n"


def named_event(name: str, payload: Any) -> bytes:
    """One event with an `event:` line, as the Responses and Messages protocols use."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(payload) + b"\n\n"


class ChunkFrames:
    """What chat and completion chunks have in common: a fixed head, one choice, optional extras."""

    KIND: ClassVar[str]  # `object` of the chunk
    SLOT: ClassVar[bytes]  # the JSON of a choice's changing part up to where the text goes
    TAIL: ClassVar[bytes]  # and what follows the text
    EMPTY: ClassVar[dict[str, Any]]  # that part, of a chunk without text

    def __init__(self, *, response_id: str, created: int, model: str, fingerprint: str = "") -> None:
        head: dict[str, Any] = {"id": response_id, "object": self.KIND, "created": created, "model": model}
        if fingerprint:
            head["system_fingerprint"] = fingerprint
        self._head = b"data: " + _encode(head)[:-1] + b',"choices":['

    def content(
        self,
        index: int,
        text: str,
        *,
        logprobs: Any = None,
        extras: dict[str, Any] | None = None,
        usage: Any = None,
    ) -> bytes:
        """One piece of text of choice `index`. `extras` are further keys of the choice."""
        if logprobs is None and extras is None and usage is None:
            before, after = self.around(index)
            return before + _encode(text) + after
        more = b"" if not extras else b"," + _encode(extras)[1:-1]
        frame = self._start(index) + _encode(text) + self.TAIL + b',"logprobs":' + _encode(logprobs)
        return frame + b',"finish_reason":null' + more + b"}]" + self._usage(usage) + _END

    def around(self, index: int) -> Around:
        """What a piece of mere text of choice `index` has before and after the JSON of that text."""
        return self._start(index), self.TAIL + b',"logprobs":null,"finish_reason":null}]' + _END

    def _start(self, index: int) -> bytes:
        return self._head + b'{"index":%d,' % index + self.SLOT

    def choice(self, choice: dict[str, Any], *, usage: Any = None) -> bytes:
        """Any other chunk with one choice: the role, the finish."""
        return self._head + _encode(choice) + b"]" + self._usage(usage) + _END

    def finish(self, index: int, ending: Ending, *, usage: Any = None) -> bytes:
        """The last chunk of a choice."""
        return self.choice({"index": index, **self.EMPTY, "logprobs": None, **ending}, usage=usage)

    def usage(self, usage: Any) -> bytes:
        """The last chunk of a stream that asked for usage: no choices."""
        return self._head + b"]" + self._usage(usage) + _END

    @staticmethod
    def _usage(usage: Any) -> bytes:
        return b"" if usage is None else b',"usage":' + _encode(usage)


class CompletionFrames(ChunkFrames):
    """Chunks of /v1/completions."""

    KIND = "text_completion"
    SLOT = b'"text":'
    TAIL = b""
    EMPTY: ClassVar[dict[str, Any]] = {"text": ""}


class ChatFrames(ChunkFrames):
    """Chunks of /v1/chat/completions."""

    KIND = "chat.completion.chunk"
    SLOT = b'"delta":{"content":'
    TAIL = b"}"
    EMPTY: ClassVar[dict[str, Any]] = {"delta": {}}

    def role(self, index: int, *, extras: dict[str, Any] | None = None, usage: Any = None) -> bytes:
        """The first chunk of each choice."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
            **(extras or {}),
        }
        return self.choice(choice, usage=usage)
