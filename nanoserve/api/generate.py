"""POST /generate: the native route in SGLang's shape, where token ids are first class.

Owner process: api. Streams carry deltas (text and ids since the last event); `meta_info` counts from the beginning.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from nanoserve.api import sse
from nanoserve.api.context import CONTEXT
from nanoserve.api.http import new_id, read_body, warning_headers
from nanoserve.api.jobs import build_requests, check_num_sequences, encode_bad_words
from nanoserve.api.logprobs import finite
from nanoserve.api.prompt import EncodedPrompt, Prompt, encode_prompts, parse_prompt
from nanoserve.api.respond import Job, respond
from nanoserve.api.results import Choice, failed_events, finish_reason, stop_reason
from nanoserve.api.schemas import MAX_COMMAS_WITH_IDS, UNSUPPORTED, BodyDecoder, GenerateBody, GenerateSampling
from nanoserve.api.stream import Piece, RequestStream
from nanoserve.api.validation import Checker, ValidRequest
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import TextFinished, TokenText

_DEFAULT_MAX_TOKENS = 128
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "token_ids_logprob": (),
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "session_params": (),
}
_BODY = BodyDecoder(GenerateBody, unsupported=UNSUPPORTED | _NOT_HERE, max_commas=MAX_COMMAS_WITH_IDS)
_SAMPLING = BodyDecoder(GenerateSampling)


async def generate(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    checker = context.require_checker()
    model = context.lifecycle.require_model()
    strict = context.config.api.strict_params
    decoded = _BODY.decode(await read_body(request), strict=strict)
    body = decoded.body
    checker.check_model_name(body.model)
    raw = bytes(body.sampling_params)
    if raw != b"null" and not raw.startswith(b"{"):
        raise RequestError("`sampling_params` must be an object.", param="sampling_params")
    sampling = _SAMPLING.decode(b"{}" if raw == b"null" else raw, strict=strict)
    valid = _check(checker, body, sampling.body)
    prompts, is_list = _prompts(body)
    check_num_sequences(len(prompts), valid.n)
    encoder = context.lifecycle.require_encoder()
    valid = await encode_bad_words(valid, encoder, model)
    encoded = await encode_prompts(prompts, model, encoder, add_special_tokens=True, truncate=valid.truncate)
    requests = build_requests(valid, encoded, model, context.seeds, fallback_max_tokens=_DEFAULT_MAX_TOKENS, clip=False)
    many = is_list or valid.n > 1
    form = GenerateFormat(valid, encoded, body, response_id=valid.label or new_id("gen"), many=many)
    job = Job(
        requests=requests,
        stream=valid.stream,
        timeout_s=valid.timeout_s,
        queue_timeout_s=valid.queue_timeout_s,
        label=valid.label,
        headers=warning_headers((*decoded.unknown_keys, *sampling.unknown_keys)),
    )
    return await respond(request, context, job, form)


def _prompts(body: GenerateBody) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list (then the answer is one)."""
    text, ids = bytes(body.text), bytes(body.input_ids)
    if (text == b"null") == (ids == b"null"):
        raise RequestError("Give either `text` or `input_ids`.", param="text")
    param = "text" if ids == b"null" else "input_ids"
    prompts = parse_prompt(text if ids == b"null" else ids, param)
    if any((prompt.text is None) == (param == "text") for prompt in prompts):
        raise RequestError(f"`{param}` has the wrong type.", param=param)
    is_list = text.startswith(b"[") or ids.replace(b" ", b"").startswith(b"[[")
    return prompts, is_list


def _check(checker: Checker, body: GenerateBody, sampling: GenerateSampling) -> ValidRequest:
    """Both bodies as one: the outer fields win."""
    num_top = checker.check_logprobs("top_logprobs_num", body.top_logprobs_num)
    wants = bool(body.return_logprob)
    fields = msgspec.structs.replace(
        sampling,
        min_tokens=sampling.min_tokens if sampling.min_new_tokens is None else sampling.min_new_tokens,
        stream=body.stream,
        priority=body.priority,
        cache_salt=body.cache_salt,
        timeout_s=body.timeout_s,
        queue_timeout_s=body.queue_timeout_s,
        rid=body.rid,
        return_token_ids=True,
        prompt_logprobs=None,
    )
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    return checker.check(
        fields,
        max_tokens=sampling.max_tokens if sampling.max_new_tokens is None else sampling.max_new_tokens,
        logprobs=(num_top or 0) if wants else None,
        prompt_logprobs=(num_top or 0) if wants and start >= 0 else None,
        min_max_tokens=0,
    )


class GenerateFormat:
    """Answers as `{text, output_ids, meta_info}`; a list of them when many were asked for."""

    def __init__(
        self,
        valid: ValidRequest,
        prompts: Sequence[EncodedPrompt],
        body: GenerateBody,
        *,
        response_id: str,
        many: bool,
    ) -> None:
        self._valid = valid
        self._prompts = prompts
        self._body = body
        self._id = response_id
        self._many = many
        self._began_s = time.monotonic()

    def frames(self, stream: RequestStream, piece: Piece) -> bytes:
        if not piece.token_ids and not piece.text and piece.finished is None:
            return b""
        scores = self._scores(piece.logprobs, piece.prompt_logprobs)
        shown = self._shown(
            stream.index, piece.text, list(piece.token_ids), piece.num_output_tokens, piece.finished, scores
        )
        return sse.event({**shown, "index": stream.index} if self._many else shown)

    def around(self, index: int) -> None:
        """Every event has something of its own."""

    def closing(self) -> bytes:
        return sse.DONE

    def failed(self, error: RequestError) -> bytes:
        return failed_events(error)

    def body(self, choices: list[Choice]) -> bytes:
        shown = []
        for choice in choices:
            ids = choice.token_ids
            scores = self._scores(choice.logprobs, choice.prompt_logprobs)
            shown.append(self._shown(choice.index, choice.text, ids, len(ids), choice.finished, scores))
        return msgspec.json.encode(shown if self._many else shown[0])

    def _shown(
        self,
        index: int,
        text: str,
        ids: list[int],
        num_output_tokens: int,
        record: TextFinished | None,
        scores: dict[str, Any],
    ) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._id,
            "finish_reason": None if record is None else self._reason(record),
            "prompt_tokens": len(self._prompts[index // self._valid.n].ids),
            "completion_tokens": num_output_tokens if record is None else record.finished.num_output_tokens,
            "cached_tokens": 0 if record is None else record.finished.num_cached_tokens,
            **scores,
        }
        if record is not None:
            meta["e2e_latency"] = time.monotonic() - self._began_s
            meta["num_retractions"] = record.finished.num_preemptions
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def _reason(self, record: TextFinished) -> dict[str, Any]:
        kind = finish_reason(record)
        if kind == "length":
            return {"type": kind, "length": record.finished.num_output_tokens}
        matched = stop_reason(record)
        return {"type": kind, "matched": record.finished.stop_token_id if matched is None else matched}

    def _scores(self, tokens: Sequence[TokenText], prompt: Sequence[TokenText] | None) -> dict[str, Any]:
        if not self._body.return_logprob:
            return {}
        start = max(self._body.logprob_start_len or 0, 0)
        scores = self._lists("output", tokens)
        if prompt is not None:
            scores |= self._lists("input", prompt[start:])
        return scores

    def _lists(self, side: str, tokens: Sequence[TokenText]) -> dict[str, Any]:
        """`[logprob, id, text]` per token, and its most likely alternatives when asked for."""
        with_text = bool(self._body.return_text_in_logprobs)
        lists: dict[str, Any] = {
            f"{side}_token_logprobs": [
                [finite(token.logprob), token.token_id, token.text if with_text else None] for token in tokens
            ]
        }
        if self._body.top_logprobs_num:
            lists[f"{side}_top_logprobs"] = [
                [[finite(score), token_id, text if with_text else None] for token_id, text, _, score in token.top]
                for token in tokens
            ]
        return lists
