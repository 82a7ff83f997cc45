"""Token-level ends of a request: EOS, stop ids, max_tokens, the context, repetition. Pure; called by the scheduler.

Stop strings are the detokenizer's: they need text. What needs only ids is decided here, exactly at the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from nanoserve.ipc.messages import FinishReason, RepetitionDetection, SamplingParams


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and why an output ends. The token that ends it counts, and is the last of `num_kept`."""

    num_kept: int  # of the tokens that were checked
    reason: FinishReason
    stop_token_id: int | None = None
    is_eos: bool = False


class RepetitionWatch:
    """Whether an output repeats itself, told token by token: O(max_pattern_size) each, however long a repetition is.

    Of each period p it keeps for how many of the newest tokens t[i] == t[i - p]; a pattern of p tokens stands there
    c times when that holds for the newest p * (c - 1).
    """

    __slots__ = ("_detection", "_ids", "_runs")

    def __init__(self, detection: RepetitionDetection, token_ids: Iterable[int] = ()) -> None:
        self._detection = detection
        self._ids: list[int] = []  # the newest; more than the longest pattern
        self._runs: dict[int, int] = {}  # by period, those above 0
        for token_id in token_ids:
            self.take(token_id)

    def take(self, token_id: int) -> bool:
        """True when the output, with this token at its end, ends with enough repetitions."""
        ids, runs, wanted = self._ids, self._runs, self._detection
        longest = min(wanted.max_pattern_size, len(ids))
        self._runs = {
            size: runs.get(size, 0) + 1
            for size in range(wanted.min_pattern_size, longest + 1)
            if ids[-size] == token_id
        }
        ids.append(token_id)
        if len(ids) > 2 * wanted.max_pattern_size:
            del ids[: -wanted.max_pattern_size]
        return any(run >= size * (wanted.min_count - 1) for size, run in self._runs.items())


def find_stop(
    new_ids: Sequence[int],
    num_output_tokens: int,
    max_output_tokens: int,
    sampling: SamplingParams,
    eos_token_ids: Collection[int],
    watch: RepetitionWatch | None = None,
) -> Stop | None:
    """The first end among `new_ids`, which follow `num_output_tokens` earlier output tokens.

    `max_output_tokens` is the smaller of max_tokens and what the context leaves. A stop id that is also the last
    token allowed is reported as STOP. Before min_tokens only the length ends a request. `ignore_eos` switches off
    the model's EOS ids, not those that the client lists itself. `watch` has taken the earlier tokens.
    """
    for index, token_id in enumerate(new_ids):
        count = num_output_tokens + index + 1
        repeats = watch is not None and watch.take(token_id)
        if count >= sampling.min_tokens:
            if not sampling.ignore_eos and token_id in eos_token_ids:
                return Stop(index + 1, FinishReason.STOP, token_id, is_eos=True)
            if token_id in sampling.stop_token_ids:
                return Stop(index + 1, FinishReason.STOP, token_id)
        if count >= max_output_tokens:
            return Stop(index + 1, FinishReason.LENGTH)
        if repeats and count >= sampling.min_tokens:
            return Stop(index + 1, FinishReason.REPETITION)
    return None


def suppressed_ids(sampling: SamplingParams, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """Ids that must not be drawn before min_tokens: each of them would end the request, or count as its end."""
    if sampling.min_tokens <= 0:
        return ()
    ends = set(sampling.stop_token_ids)
    if not sampling.ignore_eos:
        ends.update(eos_token_ids)
    return tuple(sorted(ends))
