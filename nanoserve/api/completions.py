"""POST /v1/completions: text in, text out, unary or streamed.

Owner process: api. The order of work: body, checks, prompts, requests, answer; each step can refuse with a 4xx.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from nanoserve.api import logprobs as shapes
from nanoserve.api import sse
from nanoserve.api.context import CONTEXT, ApiContext
from nanoserve.api.http import new_id, read_body, warning_headers
from nanoserve.api.jobs import build_requests, check_num_sequences, encode_bad_words
from nanoserve.api.model import ServedModel
from nanoserve.api.openai_format import OpenAIFormat
from nanoserve.api.prompt import EncodedPrompt, encode_prompts, parse_prompt
from nanoserve.api.respond import Job, respond
from nanoserve.api.results import Choice
from nanoserve.api.schemas import MAX_COMMAS_WITH_IDS, BodyDecoder, CompletionBody
from nanoserve.api.stream import Piece, RequestStream
from nanoserve.api.validation import Checker, ValidRequest

_DEFAULT_MAX_TOKENS = 16
_DECODER = BodyDecoder(CompletionBody, max_commas=MAX_COMMAS_WITH_IDS)


async def create_completion(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    checker = context.require_checker()
    model = context.lifecycle.require_model()
    decoded = _DECODER.decode(await read_body(request), strict=context.config.api.strict_params)
    body = decoded.body
    checker.check_model_name(body.model)
    valid, num_top = _check(checker, body)
    prompts = parse_prompt(bytes(body.prompt))
    check_num_sequences(len(prompts), valid.n)
    encoder = context.lifecycle.require_encoder()
    valid = await encode_bad_words(valid, encoder, model)
    encoded = await encode_prompts(
        prompts,
        model,
        encoder,
        add_special_tokens=body.add_special_tokens is not False,
        truncate=valid.truncate,
    )
    requests = build_requests(valid, encoded, model, context.seeds, fallback_max_tokens=_DEFAULT_MAX_TOKENS, clip=False)
    echo = await _echo_texts(context, model, encoded) if body.echo else None
    form = CompletionFormat(
        valid,
        encoded,
        model,
        response_id=new_id("cmpl"),
        num_top=num_top,
        echo=echo,
        prompt_logprobs=body.prompt_logprobs is not None,
    )
    job = Job(
        requests=requests,
        stream=valid.stream,
        timeout_s=valid.timeout_s,
        queue_timeout_s=valid.queue_timeout_s,
        label=valid.label,
        headers=warning_headers(decoded.unknown_keys),
    )
    return await respond(request, context, job, form)


def _check(checker: Checker, body: CompletionBody) -> tuple[ValidRequest, int | None]:
    """The checked fields, and how many top logprobs are shown."""
    num_top = checker.check_logprobs("logprobs", body.logprobs)
    if body.echo and num_top is not None and body.prompt_logprobs is not None and body.prompt_logprobs >= 0:
        body = msgspec.structs.replace(body, prompt_logprobs=max(num_top, body.prompt_logprobs))  # serves both
    valid = checker.check(
        body,
        max_tokens=body.max_tokens,
        logprobs=num_top,
        prompt_logprobs=num_top if body.echo and body.prompt_logprobs is None else None,
        min_max_tokens=0 if body.echo else 1,
    )
    return valid, num_top


async def _echo_texts(context: ApiContext, model: ServedModel, prompts: Sequence[EncodedPrompt]) -> list[str]:
    """Each prompt's text: as given, or decoded with special tokens shown."""
    decode = model.tokenizer.decode

    def texts() -> list[str]:
        return [p.text if p.text is not None else decode(p.ids, skip_special_tokens=False) for p in prompts]

    return await context.lifecycle.require_encoder().run(texts)


class CompletionFormat(OpenAIFormat[sse.CompletionFrames]):
    """Answers as OpenAI's text_completion objects."""

    def __init__(
        self,
        valid: ValidRequest,
        prompts: Sequence[EncodedPrompt],
        model: ServedModel,
        *,
        response_id: str,
        num_top: int | None,
        echo: Sequence[str] | None,
        prompt_logprobs: bool,
    ) -> None:
        super().__init__(
            valid,
            model,
            sse.CompletionFrames,
            kind="text_completion",
            response_id=response_id,
            num_prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
            num_top=num_top,
        )
        self._prompts = prompts
        self._echo = echo
        self._shows_prompt_logprobs = prompt_logprobs

    def frames(self, stream: RequestStream, piece: Piece) -> bytes:
        index = stream.index
        self._usage.note(index, piece.num_output_tokens, piece.finished)
        usage = self._usage.totals() if self._valid.continuous_usage else None
        text = piece.text
        tokens = piece.logprobs
        extras: dict[str, Any] | None = None
        shown: dict[str, Any] | None = None
        if index not in self._started:
            self._started.add(index)
            text = self._echo_of(index) + text
            if self._valid.return_token_ids:
                extras = {"prompt_token_ids": self._prompts[index // self._valid.n].ids}
            if tokens or (self._echo is not None and piece.prompt_logprobs):
                shown = self._logprobs(index, tokens, piece.prompt_logprobs)
        elif tokens:
            shown = self._logprobs(index, tokens, None)
        if self._valid.return_token_ids and (piece.token_ids or extras):
            extras = {**(extras or {}), "token_ids": list(piece.token_ids)}
        frame = b""
        if text or shown or extras:
            frame = self._frames.content(index, text, logprobs=shown, extras=extras, usage=usage)
        if piece.finished is not None:
            frame += self._frames.finish(index, self._ending(stream, piece.finished), usage=usage)
        return frame

    def _choice(self, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "text": self._echo_of(choice.index) + choice.text,
            "logprobs": self._logprobs(choice.index, choice.logprobs, choice.prompt_logprobs),
            **self._ending(choice.stream, choice.record),
        }
        if choice.prompt_logprobs is not None and self._shows_prompt_logprobs:
            shown["prompt_logprobs"] = shapes.prompt_logprobs(choice.prompt_logprobs)
        if self._valid.return_token_ids:
            shown["token_ids"] = choice.token_ids
            shown["prompt_token_ids"] = self._prompts[choice.index // self._valid.n].ids
        return shown

    def _echo_of(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index // self._valid.n]

    def _logprobs(self, index: int, tokens: Any, prompt_tokens: Any) -> dict[str, Any] | None:
        """Null unless asked for; with echo the prompt's tokens come first."""
        if self._num_top is None:
            return None
        base = len(self._echo_of(index))
        as_ids = self._valid.tokens_as_ids
        shown = shapes.completion_logprobs(tokens, as_ids=as_ids, base_offset=base, num_top=self._num_top)
        if self._echo is None or not prompt_tokens:
            return shown
        first = shapes.completion_logprobs(prompt_tokens, as_ids=as_ids, num_top=self._num_top)
        return {key: first[key] + shown[key] for key in shown}
