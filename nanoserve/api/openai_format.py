"""What the answers of /v1/completions and /v1/chat/completions have in common: head, plain pieces, ends, usage. Pure.

Owner process: api. `completions` and `chat` derive their formats from `OpenAIFormat`; `respond` calls them.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import msgspec

from nanoserve.api import sse
from nanoserve.api.model import ServedModel
from nanoserve.api.results import Choice, UsageCounter, failed_events, finish_reason, request_metrics, stop_reason
from nanoserve.api.stream import Piece, RequestStream
from nanoserve.api.validation import ValidRequest
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import TextFinished

Frames = TypeVar("Frames", bound=sse.ChunkFrames)


class OpenAIFormat(ABC, Generic[Frames]):
    """A ResponseFormat whose answer has `choices`. `num_top`: top logprobs that are shown; None: no logprobs."""

    def __init__(
        self,
        valid: ValidRequest,
        model: ServedModel,
        frames: type[Frames],
        *,
        kind: str,
        response_id: str,
        num_prompt_tokens: int,
        num_top: int | None,
    ) -> None:
        created = int(time.time())
        self._valid = valid
        self._num_top = num_top
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": kind,
            "created": created,
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }
        self._frames = frames(response_id=response_id, created=created, model=model.name, fingerprint=model.fingerprint)
        self._usage = UsageCounter(num_prompt_tokens, valid.n)
        self._is_plain = not (valid.return_token_ids or valid.continuous_usage or num_top is not None)
        self._started: set[int] = set()  # choices that have shown their first piece

    @abstractmethod
    def frames(self, stream: RequestStream, piece: Piece) -> bytes:
        """As ResponseFormat says."""

    def around(self, index: int) -> sse.Around | None:
        return self._frames.around(index) if self._is_plain and index in self._started else None

    def closing(self) -> bytes:
        return (self._frames.usage(self._usage.totals()) if self._valid.include_usage else b"") + sse.DONE

    def failed(self, error: RequestError) -> bytes:
        return failed_events(error)

    def body(self, choices: list[Choice]) -> bytes:
        for choice in choices:
            self._usage.note(choice.index, len(choice.token_ids), choice.finished)
        shown = [self._choice(choice) for choice in choices]
        usage = self._usage.totals()
        return msgspec.json.encode({**self._head, "choices": shown, "usage": usage, **self._extras(choices)})

    @abstractmethod
    def _choice(self, choice: Choice) -> dict[str, Any]:
        """One choice of the unary answer."""

    def _extras(self, choices: list[Choice]) -> dict[str, Any]:
        """Further keys of the unary answer."""
        return {}

    def _ending(self, stream: RequestStream, record: TextFinished) -> sse.Ending:
        ending: sse.Ending = {"finish_reason": finish_reason(record), "stop_reason": stop_reason(record)}
        return {**ending, "metrics": request_metrics(stream)} if self._valid.return_metrics else ending
