"""Other protocols over the chat route: their body becomes a chat body, and only the frames differ.

Owner process: api. Called by `messages` and `responses`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
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
_SAME_NAMES: Mapping[str, str] = MappingProxyType({})


async def answer_as_chat(
    request: web.Request,
    decoder: BodyDecoder[B],
    to_chat: Callable[[B], ChatBody],
    make_format: Callable[[PreparedChat, B], ResponseFormat],
    *,
    names: Mapping[str, str] = _SAME_NAMES,
) -> web.StreamResponse:
    """The whole way of one request. RequestError for what is wrong with it, before the first byte.

    `names` are the protocol's own for fields of a chat body, for what is said of them.
    """
    context = request.app[CONTEXT]
    context.lifecycle.require_ready()
    decoded = await read_json(request, decoder)
    try:
        chat = await prepare_chat(context, to_chat(decoded.body))
    except RequestError as error:
        own = names.get(error.param or "")
        if error.param and own:
            # Where the word is the field's name, and not a word of a sentence ("at most 9 messages").
            error.message = re.sub(rf"(^|`){error.param}\b", rf"\g<1>{own}", error.message)
            error.param = own
        raise
    return await respond(request, context, chat.job(decoded.unknown_keys), make_format(chat, decoded.body))
