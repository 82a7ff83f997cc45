"""POST /v1/responses: OpenAI's Responses protocol over the chat route. Text, stateless, streaming events.

Owner process: api. The body becomes a chat body; only the frames differ. Nothing is stored: `store` is accepted,
`previous_response_id` is refused.
"""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import msgspec
from aiohttp import web

from nanoserve.api import sse
from nanoserve.api.adapters import answer_as_chat
from nanoserve.api.chat import PreparedChat
from nanoserve.api.errors import envelope
from nanoserve.api.http import new_id
from nanoserve.api.results import Choice
from nanoserve.api.schemas import UNSUPPORTED_PARAMETER, BodyDecoder, ChatBody
from nanoserve.api.stream import Piece, RequestStream
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import FinishReason, TextFinished


class ResponsesBody(msgspec.Struct, kw_only=True):
    """POST /v1/responses."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timeout_s: float | None = None
    queue_timeout_s: float | None = None


_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True, False),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "include": ([],),
    "text": ({"format": {"type": "text"}}, {}),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "top_logprobs": (0,),
    "prompt": (),
    "max_tool_calls": (),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "response_format": ({"type": "text"},),
    "lora_path": (),
}
_DECODER = BodyDecoder(ResponsesBody, unsupported=_UNSUPPORTED)
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}  # of a chat body's fields
_ITEM_TYPES = frozenset({None, "message"})


async def create_response(request: web.Request) -> web.StreamResponse:
    return await answer_as_chat(request, _DECODER, _chat_body, ResponsesFormat, names=_NAMES)


def _chat_body(body: ResponsesBody) -> ChatBody:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    elif body.input:
        for item in body.input:
            if item.get("type") not in _ITEM_TYPES:
                words = "This server takes input items of type message only."
                raise RequestError(words, param="input", code=UNSUPPORTED_PARAMETER)
            role = item.get("role")
            messages.append({"role": "system" if role == "developer" else role, "content": item.get("content")})
    else:
        raise RequestError("`input` must be given and non-empty.", param="input")
    return ChatBody(
        model=body.model,
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        chat_template_kwargs=body.chat_template_kwargs,
        timeout_s=body.timeout_s,
        queue_timeout_s=body.queue_timeout_s,
    )


class ResponsesFormat:
    """Answers as response objects and their events, numbered."""

    def __init__(self, chat: PreparedChat, body: ResponsesBody) -> None:
        self._num_input = len(chat.prompt.ids)
        sampling = chat.valid.sampling
        self._item_id = new_id("msg")
        self._response: dict[str, Any] = {
            "id": new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": chat.model.name,
            "output": [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }
        self._numbers = count()
        self._texts: list[str] = []
        self._started = False

    def frames(self, stream: RequestStream, piece: Piece) -> bytes:
        frame = b""
        if not self._started:
            self._started = True
            frame = self._start()
        if piece.text:
            self._texts.append(piece.text)
            frame += self._event("response.output_text.delta", **self._place(), delta=piece.text, logprobs=[])
        if piece.finished is not None:
            frame += self._end(piece.finished)
        return frame

    def around(self, index: int) -> None:
        """Every event has something of its own."""

    def closing(self) -> bytes:
        return b""

    def failed(self, error: RequestError) -> bytes:
        words = envelope(error)["error"]
        failed = {**self._response, "status": "failed", "error": {"code": "server_error", "message": words["message"]}}
        return self._event("response.failed", response=failed)

    def body(self, choices: list[Choice]) -> bytes:
        return msgspec.json.encode(self._done(choices[0].text, choices[0].record))

    def _start(self) -> bytes:
        item = {"type": "message", "id": self._item_id, "status": "in_progress", "role": "assistant", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return b"".join(
            (
                self._event("response.created", response=self._response),
                self._event("response.in_progress", response=self._response),
                self._event("response.output_item.added", output_index=0, item=item),
                self._event("response.content_part.added", **self._place(), part=part),
            )
        )

    def _end(self, record: TextFinished) -> bytes:
        text = "".join(self._texts)
        done = self._done(text, record)
        item = done["output"][0]
        ending = "response.completed" if done["status"] == "completed" else "response.incomplete"
        return b"".join(
            (
                self._event("response.output_text.done", **self._place(), text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place(), part=item["content"][0]),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event(ending, response=done),
            )
        )

    def _done(self, text: str, record: TextFinished) -> dict[str, Any]:
        """The whole response at its end."""
        finished = record.finished
        status = "completed" if finished.reason == FinishReason.STOP else "incomplete"
        # of an abort the word says why: the deadline, or /abort_request
        aborted = record.stop_string or "abort"
        cause = {FinishReason.LENGTH: "max_output_tokens", FinishReason.ABORT: aborted}.get(finished.reason)
        item = {
            "type": "message",
            "id": self._item_id,
            "status": status,
            "role": "assistant",
            "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
        }
        usage = {
            "input_tokens": self._num_input,
            "input_tokens_details": {"cached_tokens": finished.num_cached_tokens},
            "output_tokens": finished.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_input + finished.num_output_tokens,
        }
        details = {"reason": cause} if cause else None
        return {**self._response, "status": status, "incomplete_details": details, "output": [item], "usage": usage}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        return sse.named_event(kind, {"type": kind, "sequence_number": next(self._numbers), **fields})
