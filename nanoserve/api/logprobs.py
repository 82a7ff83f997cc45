"""Log-probabilities in the shapes OpenAI's two endpoints and vLLM's prompt_logprobs use. Pure.

Owner process: api. Minus infinity becomes -9999.0, because JSON has no word for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nanoserve.ipc.messages import TokenText

MIN_LOGPROB = -9999.0


def finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, MIN_LOGPROB)


def _name(token_id: int, text: str, as_id: bool) -> str:
    return f"token_id:{token_id}" if as_id else text


def completion_logprobs(
    tokens: Sequence[TokenText], *, as_ids: bool = False, base_offset: int = 0, num_top: int | None = None
) -> dict[str, Any]:
    """`{tokens, token_logprobs, top_logprobs, text_offset}`; `base_offset` is the length of an echoed prompt.

    A top entry holds the sampled token too, as elsewhere; it is null for the first token of a prompt.
    """
    shown: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token in tokens:
        name = _name(token.token_id, token.text, as_ids)
        shown["tokens"].append(name)
        shown["token_logprobs"].append(finite(token.logprob))
        shown["text_offset"].append(base_offset + token.text_offset)
        if token.logprob is None:
            shown["top_logprobs"].append(None)
            continue
        top = {_name(token_id, text, as_ids): finite(score) for token_id, text, _, score in token.top[:num_top]}
        top.setdefault(name, finite(token.logprob))
        shown["top_logprobs"].append(top)
    return shown


def chat_logprobs(tokens: Sequence[TokenText], *, as_ids: bool = False, num_top: int | None = None) -> dict[str, Any]:
    """`{content: [{token, logprob, bytes, top_logprobs}]}` with the tokens' real bytes."""
    content = [
        {
            "token": _name(token.token_id, token.text, as_ids),
            "logprob": finite(token.logprob),
            "bytes": list(token.raw),
            "top_logprobs": [
                {"token": _name(token_id, text, as_ids), "logprob": finite(score), "bytes": list(raw)}
                for token_id, text, raw, score in token.top[:num_top]
            ],
        }
        for token in tokens
    ]
    return {"content": content}


def prompt_logprobs(tokens: Sequence[TokenText]) -> list[dict[str, Any] | None]:
    """vLLM's form: per prompt token null, or `{id: {logprob, rank, decoded_token}}` with the top entries."""
    rows: list[dict[str, Any] | None] = []
    for token in tokens:
        if token.logprob is None:
            rows.append(None)
            continue
        row = {str(token.token_id): _prompt_entry(token.logprob, token.rank, token.text)}
        for place, (token_id, text, _, score) in enumerate(token.top, start=1):
            row.setdefault(str(token_id), _prompt_entry(score, place, text))
        rows.append(row)
    return rows


def _prompt_entry(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}
