"""POST /v1/chat/completions: messages in, an assistant's message out, unary or streamed.

Owner process: api. Rendering and encoding run off the event loop; rendered text is encoded without adding special
tokens, because the template has written them already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web

from nanoserve.api import logprobs as shapes
from nanoserve.api import sse
from nanoserve.api.context import CONTEXT, ApiContext
from nanoserve.api.engine_client import NewRequest
from nanoserve.api.http import new_id, read_body, warning_headers
from nanoserve.api.jobs import build_requests, encode_bad_words
from nanoserve.api.model import ServedModel
from nanoserve.api.openai_format import OpenAIFormat
from nanoserve.api.prompt import EncodedPrompt, Prompt, encode_prompts, normal_messages
from nanoserve.api.respond import Job, respond
from nanoserve.api.results import Choice
from nanoserve.api.schemas import BodyDecoder, ChatBody
from nanoserve.api.stream import Piece, RequestStream
from nanoserve.api.validation import Checker, ValidRequest
from nanoserve.errors import RequestError

_DECODER = BodyDecoder(ChatBody)
_MAX_KWARGS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedChat:
    """A chat request that may go to the engine."""

    valid: ValidRequest
    model: ServedModel
    prompt: EncodedPrompt
    requests: list[NewRequest]
    num_top: int | None  # top logprobs that are shown; None: no logprobs
    echoed: str = ""  # text of the last message that the answer begins with

    def job(self, unknown_keys: tuple[str, ...] = ()) -> Job:
        valid = self.valid
        return Job(
            requests=self.requests,
            stream=valid.stream,
            timeout_s=valid.timeout_s,
            queue_timeout_s=valid.queue_timeout_s,
            label=valid.label,
            headers=warning_headers(unknown_keys),
        )


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    context = request.app[CONTEXT]
    context.lifecycle.require_ready()
    decoded = _DECODER.decode(await read_body(request), strict=context.config.api.strict_params)
    chat = await prepare_chat(context, decoded.body)
    form = ChatFormat(chat, response_id=new_id("chatcmpl"))
    return await respond(request, context, chat.job(decoded.unknown_keys), form)


async def prepare_chat(context: ApiContext, body: ChatBody) -> PreparedChat:
    """All checks, the prompt, and the requests; RequestError for what is wrong. Every chat-like route comes here."""
    checker = context.require_checker()
    model = context.lifecycle.require_model()
    checker.check_model_name(body.model)
    valid, num_top, clip = _check(checker, body)
    valid = await encode_bad_words(valid, context.lifecycle.require_encoder(), model)
    prompt = await encode_chat(context, model, body, valid.truncate)
    requests = build_requests(valid, [prompt], model, context.seeds, fallback_max_tokens=None, clip=clip)
    echoed = _last_text(body.messages) if body.echo else ""
    return PreparedChat(valid=valid, model=model, prompt=prompt, requests=requests, num_top=num_top, echoed=echoed)


def _last_text(messages: list[dict[str, Any]] | None) -> str:
    """The last message's text where it is the assistant's: the beginning of its answer."""
    last = normal_messages(messages)[-1]
    return last["content"] or "" if last["role"] == "assistant" else ""


def _check(checker: Checker, body: ChatBody) -> tuple[ValidRequest, int | None, bool]:
    """Checked fields, how many top logprobs are shown (None: no logprobs), and whether max_tokens is a mere bound."""
    top = checker.check_logprobs("top_logprobs", body.top_logprobs)
    if top and not body.logprobs:
        raise RequestError("when using `top_logprobs`, `logprobs` must be set to true.", param="top_logprobs")
    num_top = (top or 0) if body.logprobs else None
    bound = body.max_completion_tokens
    valid = checker.check(body, max_tokens=bound if bound is not None else body.max_tokens, logprobs=num_top)
    return valid, num_top, bound is not None


async def render_chat(
    context: ApiContext,
    model: ServedModel,
    messages: list[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    kwargs: dict[str, Any] | None,
) -> str:
    """The prompt text of these messages. RequestError for messages or arguments the template cannot take."""
    normal = normal_messages(messages)
    if model.template is None:
        raise RequestError("This model has no chat template; use /v1/completions.", param="messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            param="continue_final_message",
        )
    if kwargs and (len(kwargs) > _MAX_KWARGS or not all(key.isidentifier() for key in kwargs)):
        raise RequestError("`chat_template_kwargs` must be a few names with values.", param="chat_template_kwargs")
    default_prompt = not continue_final_message
    render = partial(
        model.template.render,
        normal,
        add_generation_prompt=default_prompt if add_generation_prompt is None else add_generation_prompt,
        continue_final_message=bool(continue_final_message),
        kwargs=kwargs,
    )
    return await context.lifecycle.require_encoder().run(render)


async def encode_chat(context: ApiContext, model: ServedModel, body: ChatBody, truncate: int | None) -> EncodedPrompt:
    """The prompt of a chat request, as ids equal to the template's own tokenization."""
    text = await render_chat(
        context,
        model,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        kwargs=body.chat_template_kwargs,
    )
    encoder = context.lifecycle.require_encoder()
    add_special = body.add_special_tokens is True
    rows = await encode_prompts([Prompt(text, None)], model, encoder, add_special_tokens=add_special, truncate=truncate)
    return rows[0]


class ChatFormat(OpenAIFormat[sse.ChatFrames]):
    """Answers as OpenAI's chat.completion objects and chunks."""

    def __init__(self, chat: PreparedChat, *, response_id: str) -> None:
        super().__init__(
            chat.valid,
            chat.model,
            sse.ChatFrames,
            kind="chat.completion",
            response_id=response_id,
            num_prompt_tokens=len(chat.prompt.ids),
            num_top=chat.num_top,
        )
        self._prompt = chat.prompt
        self._echoed = chat.echoed

    def frames(self, stream: RequestStream, piece: Piece) -> bytes:
        index = stream.index
        self._usage.note(index, piece.num_output_tokens, piece.finished)
        usage = self._usage.totals() if self._valid.continuous_usage else None
        frame = b""
        if index not in self._started:
            self._started.add(index)
            first = {"prompt_token_ids": self._prompt.ids} if self._valid.return_token_ids else None
            frame = self._frames.role(index, extras=first, usage=usage)
            if self._echoed:
                frame += self._frames.content(index, self._echoed, usage=usage)
        shown = self._logprobs(piece.logprobs) if piece.logprobs else None
        extras = {"token_ids": list(piece.token_ids)} if self._valid.return_token_ids and piece.token_ids else None
        if piece.text or shown or extras:
            frame += self._frames.content(index, piece.text, logprobs=shown, extras=extras, usage=usage)
        if piece.finished is not None:
            frame += self._frames.finish(index, self._ending(stream, piece.finished), usage=usage)
        return frame

    def _extras(self, choices: list[Choice]) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if choices[0].prompt_logprobs is not None:
            extras["prompt_logprobs"] = shapes.prompt_logprobs(choices[0].prompt_logprobs)
        if self._valid.return_token_ids:
            extras["prompt_token_ids"] = self._prompt.ids
        return extras

    def _choice(self, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": self._echoed + choice.text, "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            **self._ending(choice.stream, choice.record),
        }
        if self._valid.return_token_ids:
            shown["token_ids"] = choice.token_ids
        return shown

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return shapes.chat_logprobs(tokens, as_ids=self._valid.tokens_as_ids, num_top=self._num_top)
