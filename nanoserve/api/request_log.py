"""One log line per request that reached the engine: ids, sizes, times, how it ended. Never a prompt or an answer.

Owner process: api. `respond` tells it of every end; `/configure_logging` changes it in all api processes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from nanoserve.api.stream import RequestStream
from nanoserve.ipc.messages import FinishReason, LogChoice, SamplingParams
from nanoserve.obs.logs import set_level

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # whether there are lines is a choice of its own, also where --log-level is above

MAX_LEVEL = 1  # 0: ids, sizes and times; 1: sampling parameters too
_USUAL = msgspec.structs.asdict(SamplingParams())


class RequestLog:
    """Whether lines are written, and how much they tell."""

    def __init__(self, *, is_on: bool, level: int) -> None:
        self.is_on = is_on
        self.level = level

    def choose(self, choice: LogChoice) -> None:
        """Takes what was chosen; the rest stays as it is."""
        if choice.log_requests is not None:
            self.is_on = choice.log_requests
        if choice.log_requests_level is not None:
            self.level = choice.log_requests_level
        if choice.log_level:
            set_level(choice.log_level)

    def note(self, label: str, name: str, path: str, streams: Sequence[RequestStream], seconds: float) -> None:
        """Writes the line of one HTTP request that has ended. `name` is what the client called it in its body."""
        if not self.is_on or not streams:
            return
        records = [stream.finished.finished for stream in streams if stream.finished is not None]
        parts = [
            f"prompt {sum(len(stream.request.prompt_token_ids) // 4 for stream in streams)}"
            f", cached {sum(record.num_cached_tokens for record in records)}"
            f", output {sum(len(stream.output_ids) for stream in streams)} tokens"
        ]
        waits = [stream.first_ns - stream.submitted_ns for stream in streams if stream.first_ns]
        parts.append(f"first token {min(waits) / 1e9:.3f} s" if waits else "no token")
        parts.append(f"{seconds:.3f} s in all")
        parts.append(", ".join(dict.fromkeys(_end_of(stream) for stream in streams)))
        if len(streams) > 1:
            parts.insert(0, f"{len(streams)} choices")
        if name and name != label:
            parts.insert(0, ascii(name))
        if self.level >= 1:
            parts.append(sampling_words(streams[0].request.sampling))
        log.info("request %s: %s; %s", label, path, "; ".join(parts))


def _end_of(stream: RequestStream) -> str:
    """How the request ended; one without a terminal record was left alone by its client or siblings."""
    return "dropped" if stream.finished is None else FinishReason(stream.finished.finished.reason).name.lower()


def sampling_words(sampling: SamplingParams) -> str:
    """What differs from the defaults. Of lists only their length: ids may spell what the client wrote."""
    values = msgspec.structs.asdict(sampling)
    return " ".join(f"{key}={_shown(value)}" for key, value in values.items() if value != _USUAL[key]) or "defaults"


def _shown(value: Any) -> str:
    return f"({len(value)})" if isinstance(value, tuple | dict) else str(value)
