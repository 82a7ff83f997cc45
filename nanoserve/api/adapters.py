"""Other protocols over the chat route: their body becomes a chat body, and only the frames differ.

Owner process: api. Called by `messages` and `responses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from nanoserve.api.chat import PreparedChat, prepare_chat
from nanoserve.api.context import CONTEXT
from nanoserve.api.http import read_json
from nanoserve.api.respond import respond
from nanoserve.api.results import ResponseFormat
from nanoserve.api.schemas import BodyDecoder, ChatBody
from nanoserve.errors import RequestError

B = TypeVar("B", bound=msgspec.Struct)


async def answer_as_chat(
    request: web.Request,
    decoder: BodyDecoder[B],
    to_chat: Callable[[B], ChatBody],
    make_format: Callable[[PreparedChat, B], ResponseFormat],
    *,
    messages_field: str = "messages",
) -> web.StreamResponse:
    """The whole way of one request. RequestError for what is wrong with it, before the first byte.

    `messages_field` is the protocol's own name of the messages, for `param`.
    """
    context = request.app[CONTEXT]
    context.lifecycle.require_ready()
    decoded = await read_json(request, decoder)
    try:
        chat = await prepare_chat(context, to_chat(decoded.body))
    except RequestError as error:
        if error.param == "messages":
            error.param = messages_field
        raise
    return await respond(request, context, chat.job(decoded.unknown_keys), make_format(chat, decoded.body))
