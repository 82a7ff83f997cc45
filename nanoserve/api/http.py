"""Reading requests and writing plain answers: bodies, ids, headers.

Owner process: api. Called by every handler.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from typing import Any

import msgspec
from aiohttp import web

from nanoserve.api.admission import BodyBudget
from nanoserve.api.context import CONTEXT
from nanoserve.api.errors import http_error
from nanoserve.api.schemas import B, BodyDecoder, Decoded, header_safe
from nanoserve.errors import RequestError

REQUEST_ID_HEADER = "X-Request-Id"
WARNINGS_HEADER = "X-Nanoserve-Warnings"
_ENCODINGS = frozenset({"identity", "gzip", "deflate"})
_LABEL = web.RequestKey("label", str)
_REQUEST_ID = re.compile(r"^[\x21-\x7e]{1,128}$")


def new_id(prefix: str) -> str:
    """A random id for a response; never a key of anything."""
    return f"{prefix}-{secrets.token_hex(12)}"


def request_label(request: web.Request) -> str:
    """The client's X-Request-Id if it is short and printable, else one of ours. For logs and one header only."""
    label = request.get(_LABEL)
    if label is None:
        given = request.headers.get(REQUEST_ID_HEADER, "")
        label = request[_LABEL] = given if _REQUEST_ID.match(given) else secrets.token_hex(8)
    return label


async def read_body(request: web.Request) -> bytes:
    """The whole body. RequestError 400 for another content type or a broken encoding, 413 when it is too large,
    415 for an encoding that would be read as if it were none, 503 when all bodies together are too large.
    """
    context = request.app[CONTEXT]
    if request.body_exists and "Content-Type" in request.headers and request.content_type != "application/json":
        words = "Unsupported Media Type: Only 'application/json' is allowed"  # as other servers say it
        raise RequestError(f"{words}; send the header `Content-Type: application/json`.")
    if request.headers.get("Content-Encoding", "identity").lower() not in _ENCODINGS:
        raise http_error(415, "The body's Content-Encoding is not one of gzip, deflate and identity.")
    if (request.content_length or 0) > request.client_max_size:
        raise http_error(413, "The request body is too large.")  # before a byte of it is read
    try:
        async with asyncio.timeout(context.config.api.body_timeout or None):
            return await _read(request, context.bodies)
    except TimeoutError:
        raise http_error(408, "The request body did not come in time.") from None
    except (web.RequestPayloadError, ValueError, EOFError) as error:
        raise RequestError(f"The body could not be read ({type(error).__name__}).") from None


async def _read(request: web.Request, bodies: BodyBudget) -> bytes:
    """As `request.read`, within the budget; and nothing keeps the body when the handler is done with it."""
    chunks: list[bytes] = []
    num_bytes = 0
    try:
        async for chunk in request.content.iter_any():
            bodies.take(len(chunk))
            num_bytes += len(chunk)
            chunks.append(chunk)
            if num_bytes > request.client_max_size:
                raise http_error(413, "The request body is too large.")
        return b"".join(chunks)
    finally:
        bodies.give(num_bytes)


async def read_json(request: web.Request, decoder: BodyDecoder[B]) -> Decoded[B]:
    """The body as `decoder` reads it; fields nobody knows are refused with `--strict-params`."""
    strict = request.app[CONTEXT].config.api.strict_params
    return decoder.decode(await read_body(request), strict=strict)


def json_response(payload: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(payload), status=status, content_type="application/json", headers=headers
    )


def warning_headers(unknown_keys: tuple[str, ...]) -> dict[str, str]:
    return {WARNINGS_HEADER: header_safe(unknown_keys)} if unknown_keys else {}
