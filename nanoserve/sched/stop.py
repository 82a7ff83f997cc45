"""Token-level ends of a request: EOS, stop ids, max_tokens, the context. Pure; called by the scheduler.

Stop strings are the detokenizer's: they need text. What needs only ids is decided here, exactly at the step.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from nanoserve.ipc.messages import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and why an output ends. The token that ends it counts, and is the last of `num_kept`."""

    num_kept: int  # of the tokens that were checked
    reason: FinishReason
    stop_token_id: int | None = None
    is_eos: bool = False


def find_stop(
    new_ids: Sequence[int],
    num_output_tokens: int,
    max_output_tokens: int,
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
) -> Stop | None:
    """The first end among `new_ids`, which follow `num_output_tokens` earlier output tokens.

    `max_output_tokens` is the smaller of max_tokens and what the context leaves. A stop id that is also the last
    token allowed is reported as STOP. Before min_tokens only the length ends a request. `ignore_eos` switches off
    the model's EOS ids, not those that the client lists itself.
    """
    for index, token_id in enumerate(new_ids):
        count = num_output_tokens + index + 1
        if count >= sampling.min_tokens:
            if not sampling.ignore_eos and token_id in eos_token_ids:
                return Stop(index + 1, FinishReason.STOP, token_id, is_eos=True)
            if token_id in sampling.stop_token_ids:
                return Stop(index + 1, FinishReason.STOP, token_id)
        if count >= max_output_tokens:
            return Stop(index + 1, FinishReason.LENGTH)
    return None


def suppressed_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """Ids that must not be drawn before min_tokens: each of them would end the request, or count as its end."""
    if sampling.min_tokens <= 0:
        return ()
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(eos_token_ids)
    return tuple(sorted(ends))
