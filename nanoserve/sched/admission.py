"""Which requests the scheduler refuses, and with which words. Pure; called by `Scheduler.add`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from math import isfinite

from nanoserve.errors import RequestError
from nanoserve.ipc.messages import SamplingParams
from nanoserve.sched.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """What the configuration and the loaded model allow."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_queued: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    policy: str = "fcfs"
    prefix_cache: bool = True
    prompt_tokens_per_stream: int = 0  # of a step that streams are in, see `sched.budget`; 0: no bound
    base_prompt_tokens: int = 32  # of such a step, beside those per stream
    prompt_context_cost: float = 0.0  # of such tokens per token of context, see `sched.budget`
    num_draft_tokens: int = 0  # most drafts in a row; 0: no speculation
    shortest_match: int = 3  # ids that must have stood before, so that what followed them is a draft
    context_cost: float = 0.0  # of a token of a row's context, in tokens computed, see `sched.drafts`

    @property
    def context_len(self) -> int:
        """Most tokens of prompt and output together: the model's limit, or less where the KV memory is smaller.

        So every admitted request fits into an empty pool up to its last token.
        """
        return min(self.max_model_len, self.num_blocks * self.block_size)

    @property
    def max_num_running(self) -> int:
        """Each running request gets at least one token a step, so there are never more of them than tokens."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def check_admissible(request: Request, limits: SchedulerLimits, num_requests: int) -> None:
    """RequestError when this request cannot be served: 400 ever, 503 now. `num_requests` run or wait already.

    A resumed request (it has output) was admitted before, so a full queue does not refuse it, nor a probe. The bound
    counts running and waiting together, or an engine that begins again could not take back what it had.
    """
    prompt_len = request.num_prompt_tokens
    if prompt_len == 0:
        raise RequestError("The prompt is empty: it must contain at least one token.", param="prompt")
    if prompt_len >= limits.context_len:
        raise RequestError(_too_long(prompt_len, limits), param="prompt", code="context_length_exceeded")
    if min(request.token_ids) < 0 or max(request.token_ids) >= limits.vocab_size:
        message = f"The prompt contains a token id outside the vocabulary: ids are 0 to {limits.vocab_size - 1}."
        raise RequestError(message, param="prompt")
    _check_sampling(request.sampling, limits.vocab_size)
    has_place = request.num_output_tokens or request.is_probe
    if num_requests >= limits.max_num_seqs + limits.max_num_queued and not has_place:
        message = "The engine is currently busy and cannot accept new requests. Please try again later."
        raise RequestError(message, status=503, error_type="service_unavailable_error", code="queue_full")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """What would break a step, and with it the requests beside this one. The edge has checked it, with better words."""
    ids = [*sampling.logit_bias, *sampling.stop_token_ids, *chain.from_iterable(sampling.bad_words)]
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise RequestError(
            f"The sampling fields name a token id outside the vocabulary: ids are 0 to {vocab_size - 1}."
        )
    if not -(2**63) <= sampling.seed < 2**63:
        raise RequestError("`seed` must fit into 64 bits.", param="seed")
    numbers = [sampling.temperature, sampling.top_p, sampling.min_p, sampling.repetition_penalty]
    numbers += [sampling.presence_penalty, sampling.frequency_penalty, *sampling.logit_bias.values()]
    if not all(map(isfinite, numbers)):
        raise RequestError("The sampling fields hold a number that is not finite.")


def _too_long(prompt_len: int, limits: SchedulerLimits) -> str:
    subject = "This model's maximum context length is"
    if limits.context_len < limits.max_model_len:
        subject = "The KV cache of this server limits the context length to"
    return (
        f"{subject} {limits.context_len} tokens. However, your prompt contains {prompt_len} input tokens, which "
        "exceeds this limit even without any output tokens. Please reduce the length of the input prompt."
    )
