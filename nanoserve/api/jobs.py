"""From checked fields and encoded prompts to single requests for the ring.

Owner process: api. `n` samples of k prompts are k*n requests; index = prompt * n + sample.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import msgspec

from nanoserve.api.encoding import Encoder
from nanoserve.api.engine_client import NewRequest
from nanoserve.api.model import ServedModel
from nanoserve.api.prompt import PROMPT_TAIL, EncodedPrompt, fit_max_tokens
from nanoserve.api.validation import MAX_SEQUENCES, ValidRequest
from nanoserve.errors import RequestError

_ONLY_THE_END = 2**31 - 1  # a unary answer is written once; nothing in between needs a wake-up


def build_requests(
    valid: ValidRequest,
    prompts: Sequence[EncodedPrompt],
    model: ServedModel,
    seeds: random.Random,
    *,
    fallback_max_tokens: int | None,
    clip: bool,
) -> list[NewRequest]:
    """One request per choice. RequestError when a prompt and its answer do not fit the context."""
    requests: list[NewRequest] = []
    for number, prompt in enumerate(prompts):
        max_tokens = fit_max_tokens(
            len(prompt.ids), valid.max_tokens, fallback_max_tokens, model.max_model_len, clip=clip
        )
        text = msgspec.structs.replace(valid.text, prompt_tail=tuple(prompt.ids[-PROMPT_TAIL:]))
        for sample in range(valid.n):
            requests.append(
                NewRequest(
                    prompt_token_ids=prompt.ids,
                    sampling=valid.child_sampling(sample, max_tokens, seeds),
                    text=text,
                    priority=valid.priority,
                    cache_salt=valid.cache_salt,
                    index=number * valid.n + sample,
                    interval=valid.interval if valid.stream else _ONLY_THE_END,
                )
            )
    return requests


async def encode_bad_words(valid: ValidRequest, encoder: Encoder, model: ServedModel) -> ValidRequest:
    """Each word as the ids it has at the beginning of a text and after a space."""
    if not valid.bad_words:
        return valid
    spelled = [text for word in valid.bad_words for text in (word, " " + word.lstrip())]
    rows = await encoder.encode(spelled, add_special_tokens=False)
    words = tuple(dict.fromkeys(tuple(ids) for ids in rows if ids and max(ids) < model.vocab_size))
    return replace(valid, sampling=msgspec.structs.replace(valid.sampling, bad_words=words))


def check_num_sequences(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(f"A request may ask for at most {MAX_SEQUENCES} choices in all.", param="n")
