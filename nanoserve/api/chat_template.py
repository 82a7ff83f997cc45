"""Renders a model's own chat template in a sandbox, with the semantics transformers gives those templates.

Owner process: api, off the event loop (`encoding` runs it in its thread). Pure. The environment follows transformers'
`render_jinja_template`: immutable sandbox (here with bounds), trimmed blocks, loop controls, `raise_exception`,
`tojson`, `strftime_now`, and the `generation` tag (its content is kept, the tag itself is for training).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from nanoserve.api.template_sandbox import MAX_SIZE, BoundedSandbox
from nanoserve.errors import RequestError, StartupError

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "chat_template", "raise_exception", "strftime_now"}
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` renders its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes HTML, which no model was trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """One compiled template. `special_tokens` are the names templates use, such as `bos_token`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = BoundedSandbox([_GenerationTag, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        self._knows_developer = "developer" in source
        self._begin = environment.begin
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. A template's own complaint is a RequestError 400 with the template's words."""
        given = kwargs or {}
        for name in given.keys() & (_RESERVED | self._special_tokens.keys()):
            raise RequestError(f"`chat_template_kwargs` may not set `{name}`.", param="chat_template_kwargs")
        arguments = {**self._special_tokens, **given}
        final = ""
        if not self._knows_developer:  # newer clients' name of the system role
            messages = [{**m, "role": "system"} if m.get("role") == "developer" else m for m in messages]
        if continue_final_message:
            messages, final = _mark_final_message(messages)
        try:
            self._begin()
            text = self._rendered(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **arguments,
            )
        except jinja2.TemplateError as error:
            raise RequestError(f"The chat template refused these messages: {error.message}", param="messages") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
            # templates take messages apart without checks; what does not fit (or nests too deeply: RecursionError) is
            # the request's fault
            words = f"The chat template could not use these messages ({type(error).__name__})."
            raise RequestError(words, param="messages") from None
        return _cut_after_final(text, final) if continue_final_message else text

    def _rendered(self, **arguments: Any) -> str:
        """The whole text; given up as soon as it is too long for any model."""
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(**arguments):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_SIZE:
                raise RequestError("The rendered chat is too long.", param="messages", code="context_length_exceeded")
        return "".join(pieces)


def _mark_final_message(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Appends a mark to the last message, so that its end is found in the rendered text."""
    last = messages[-1]
    content = last.get("content")
    if not isinstance(content, str):
        raise RequestError("`continue_final_message` needs text in the last message.", param="continue_final_message")
    return [*messages[:-1], {**last, "content": content + _CONTINUE_TAG}], content


def _cut_after_final(text: str, final: str) -> str:
    """The rendered text up to the end of the last message; spaces follow what the template does with them."""
    if final.strip() not in text or _CONTINUE_TAG.strip() not in text:
        words = "The chat template does not show the last message, so it cannot be continued."
        raise RequestError(words, param="continue_final_message")
    end = text.rindex(_CONTINUE_TAG.strip())
    if text[end : end + len(_CONTINUE_TAG)] == _CONTINUE_TAG:
        return text[:end]
    return text[:end].rstrip()
