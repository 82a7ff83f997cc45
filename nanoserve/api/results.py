"""What the formats of all endpoints share: whole choices, finish reasons, usage. Pure.

Owner process: api. Called by `completions`, `chat` and the other formats.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from nanoserve.api import sse
from nanoserve.api.sse import Around
from nanoserve.api.stream import Piece, RequestStream
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import FinishReason, TextFinished, TokenText

_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.REPETITION: "repetition",
}


def finish_reason(record: TextFinished) -> str:
    return _REASONS.get(record.finished.reason, "error")


def stop_reason(record: TextFinished) -> str | int | None:
    """The stop string, or the stop id where it is not the model's own end of sequence."""
    if record.stop_string is not None:
        return record.stop_string
    return None if record.finished.is_eos else record.finished.stop_token_id


def request_metrics(stream: RequestStream) -> dict[str, float | None]:
    """Times of one ended request, in milliseconds; names as vLLM's. None where there is nothing to measure."""
    num_tokens = len(stream.output_ids)
    record = stream.finished.finished if stream.finished is not None else None
    has_queue_time = record is not None and record.scheduled_ns and record.arrival_ns
    generation_ms = (stream.last_ns - stream.first_ns) / 1e6
    total_s = (stream.last_ns - stream.submitted_ns) / 1e9
    return {
        "time_to_first_token_ms": (stream.first_ns - stream.submitted_ns) / 1e6 if stream.first_ns else None,
        "generation_time_ms": generation_ms if stream.first_ns else None,
        "queue_time_ms": (record.scheduled_ns - record.arrival_ns) / 1e6 if record and has_queue_time else None,
        "mean_itl_ms": generation_ms / (num_tokens - 1) if num_tokens > 1 else None,
        "tokens_per_second": num_tokens / total_s if total_s > 0 else None,
    }


@dataclass(slots=True)
class Choice:
    """One choice of a unary answer, put together piece by piece."""

    stream: RequestStream
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    prompt_logprobs: list[TokenText] | None = None
    finished: TextFinished | None = None

    @property
    def index(self) -> int:
        return self.stream.index

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        if piece.prompt_logprobs is not None:
            self.prompt_logprobs = piece.prompt_logprobs
        if piece.finished is not None:
            self.finished = piece.finished

    @property
    def record(self) -> TextFinished:
        assert self.finished is not None  # a unary answer is formatted only when every choice has ended
        return self.finished


class UsageCounter:
    """Totals over all choices of a response. Each prompt counts once, however many samples it has."""

    def __init__(self, num_prompt_tokens: int, samples_per_prompt: int) -> None:
        self._num_prompt = num_prompt_tokens
        self._samples = samples_per_prompt
        self._outputs: dict[int, int] = {}
        self._cached: dict[int, int] = {}

    def note(self, index: int, num_output_tokens: int, record: TextFinished | None) -> None:
        self._outputs[index] = num_output_tokens
        if record is not None:
            # The record counts what belongs to the answer; tokens made after a stop string are not billed.
            self._outputs[index] = record.finished.num_output_tokens
            if index % self._samples == 0:
                self._cached[index] = record.finished.num_cached_tokens

    def totals(self) -> dict[str, Any]:
        completion = sum(self._outputs.values())
        return {
            "prompt_tokens": self._num_prompt,
            "total_tokens": self._num_prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }


class ResponseFormat(Protocol):
    """How one endpoint shows its answer. Keeps the state of one response; no I/O."""

    def frames(self, stream: RequestStream, piece: Piece) -> bytes:
        """All events for this piece, the finish included; may be empty."""
        ...

    def around(self, index: int) -> Around | None:
        """The bytes around the JSON of a later piece of mere text of this choice, where they are always the same."""
        ...

    def closing(self) -> bytes:
        """What follows when every choice has ended: usage, terminator."""
        ...

    def failed(self, error: RequestError) -> bytes:
        """The end of a stream that fails after its first byte."""
        ...

    def body(self, choices: list[Choice]) -> bytes:
        """The unary answer; every choice has ended."""
        ...


def failed_events(error: RequestError) -> bytes:
    return sse.error_event(error) + sse.DONE
