"""POST /v1/messages: Anthropic's Messages protocol over the chat route. Text, stateless, streaming events.

Owner process: api. The body becomes a chat body; only the frames differ.
"""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from nanoserve.api import sse
from nanoserve.api.adapters import answer_as_chat
from nanoserve.api.chat import PreparedChat, encode_chat
from nanoserve.api.context import CONTEXT
from nanoserve.api.errors import messages_envelope
from nanoserve.api.http import json_response, new_id, read_json, warning_headers
from nanoserve.api.results import Choice
from nanoserve.api.schemas import BodyDecoder, ChatBody
from nanoserve.api.stream import Piece, RequestStream
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import FinishReason, TextFinished


class MessagesBody(msgspec.Struct, kw_only=True):
    """POST /v1/messages."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "thinking": ({"type": "disabled"},),
    "container": (),
    "context_management": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "output_format": ({"type": "text"},),
    "response_format": ({"type": "text"},),
    "lora_path": (),
}
_DECODER = BodyDecoder(MessagesBody, unsupported=_UNSUPPORTED)


async def create_message(request: web.Request) -> web.StreamResponse:
    return await answer_as_chat(request, _DECODER, _bounded_chat_body, lambda chat, _: MessagesFormat(chat))


async def count_tokens(request: web.Request) -> web.Response:
    """How many tokens the prompt of such a request has."""
    context = request.app[CONTEXT]
    model = context.lifecycle.require_model()
    decoded = await read_json(request, _DECODER)
    if context.checker is not None:
        context.checker.check_model_name(decoded.body.model)
    prompt = await encode_chat(context, model, _chat_body(decoded.body), None)
    return json_response({"input_tokens": len(prompt.ids)}, headers=warning_headers(decoded.unknown_keys))


def _bounded_chat_body(body: MessagesBody) -> ChatBody:
    if body.max_tokens is None:
        raise RequestError("`max_tokens` must be given.", param="max_tokens")
    return _chat_body(body)


def _chat_body(body: MessagesBody) -> ChatBody:
    messages = list(body.messages or [])
    if not messages:
        raise RequestError("`messages` must be a non-empty list.", param="messages")
    if body.system is not None and body.system != []:
        messages.insert(0, {"role": "system", "content": body.system})
    # a last message of the assistant is the beginning of the answer
    continues = messages[-1].get("role") == "assistant" or None
    return ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        continue_final_message=continues,
        chat_template_kwargs=body.chat_template_kwargs,
        timeout_s=body.timeout_s,
        queue_timeout_s=body.queue_timeout_s,
    )


def _stop(record: TextFinished) -> dict[str, Any]:
    if record.finished.reason == FinishReason.LENGTH:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if record.finished.reason == FinishReason.STOP and record.stop_string is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": record.stop_string}
    if record.finished.reason == FinishReason.ABORT:  # a deadline, or /abort_request: it could go on from here
        return {"stop_reason": "pause_turn", "stop_sequence": None}
    return {"stop_reason": "end_turn", "stop_sequence": None}


class MessagesFormat:
    """Answers as message objects and the six events of a streamed message."""

    def __init__(self, chat: PreparedChat) -> None:
        self._num_input = len(chat.prompt.ids)
        self._head: dict[str, Any] = {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": chat.model.name,
        }
        self._started = False

    def frames(self, stream: RequestStream, piece: Piece) -> bytes:
        frame = b""
        if not self._started:
            self._started = True
            frame = self._start()
        if piece.text:
            delta = {"type": "text_delta", "text": piece.text}
            frame += _event({"type": "content_block_delta", "index": 0, "delta": delta})
        if piece.finished is not None:
            frame += _event({"type": "content_block_stop", "index": 0})
            usage = self._usage(piece.finished)
            frame += _event({"type": "message_delta", "delta": _stop(piece.finished), "usage": usage})
        return frame

    def around(self, index: int) -> None:
        """Every event has something of its own."""

    def closing(self) -> bytes:
        return _event({"type": "message_stop"})

    def failed(self, error: RequestError) -> bytes:
        return _event(messages_envelope(error))

    def body(self, choices: list[Choice]) -> bytes:
        record = choices[0].record
        content = [{"type": "text", "text": choices[0].text}]
        return msgspec.json.encode({**self._head, "content": content, **_stop(record), "usage": self._usage(record)})

    def _start(self) -> bytes:
        usage = {"input_tokens": self._num_input, "output_tokens": 0}
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return _event({"type": "message_start", "message": message}) + _event(block)

    def _usage(self, record: TextFinished) -> dict[str, Any]:
        """What the prefix cache had is not in `input_tokens`: clients of this protocol add the three up."""
        return {
            "input_tokens": self._num_input - record.finished.num_cached_tokens,
            "output_tokens": record.finished.num_output_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": record.finished.num_cached_tokens,
        }


def _event(payload: dict[str, Any]) -> bytes:
    return sse.named_event(payload["type"], payload)
