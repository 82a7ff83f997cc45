"""The aiohttp application: routes, and one middleware that turns every outcome into our envelope and headers.

Owner process: api. `build_app` wires, `process` runs it; tests run it over in-memory or fake peers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import HttpVersion11, web

from nanoserve.api import control, ops
from nanoserve.api.access import OPEN_PATHS
from nanoserve.api.chat import create_chat_completion
from nanoserve.api.completions import create_completion
from nanoserve.api.context import CONTEXT, ApiContext
from nanoserve.api.edge import Connection
from nanoserve.api.errors import Unavailable, envelope, http_error, messages_envelope
from nanoserve.api.generate import generate
from nanoserve.api.http import REQUEST_ID_HEADER, request_label
from nanoserve.api.messages import count_tokens, create_message
from nanoserve.api.openapi import openapi
from nanoserve.api.respond import resume
from nanoserve.api.responses import create_response
from nanoserve.api.resume import LAST_EVENT_ID
from nanoserve.errors import RequestError

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HTTP_WORDS = {
    404: "There is nothing at this path.",
    405: "This path does not take this method.",
    413: "The request body is too large.",
}
# of other servers, for models of other kinds
_NOT_SERVED = frozenset(
    (
        *(prefix + path for prefix in ("", "/v1") for path in ("/embeddings", "/rerank", "/score", "/classify")),
        *("/pooling", "/v1/moderations", "/v1/images/generations"),
        *("/v1/audio/speech", "/v1/audio/transcriptions", "/v1/audio/translations"),
    )
)


def error_response(error: RequestError, context: ApiContext, path: str = "") -> web.Response:
    headers = {}
    if isinstance(error, Unavailable):
        seconds = context.retry_after_s() if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(math.ceil(seconds))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=msgspec.json.encode(messages_envelope(error) if path.startswith("/v1/messages") else envelope(error)),
        status=error.status,
        content_type="application/json",
        headers=headers,
    )


@web.middleware
async def outcome_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors to envelopes, the request id to a header, the outcome to a counter."""
    label = request_label(request)
    context = request.app[CONTEXT]
    path = context.own_path(request.path)
    if isinstance(request.protocol, Connection):
        request.protocol.headers_seen()
    try:
        if request.method == "OPTIONS":
            return _options(request, context)
        context.access.check(path, request.headers)
        if context.resumes is not None and LAST_EVENT_ID in request.headers and path not in OPEN_PATHS:
            response = await resume(request, context, context.resumes)
        else:
            response = await handler(request)
    except RequestError as error:
        context.failures.note(label, error, context.clock_s())
        response = error_response(error, context, path)
    except web.HTTPException as error:
        words = _HTTP_WORDS.get(error.status, error.reason)
        if error.status == 404 and path in _NOT_SERVED:
            words = "This server generates text from text; it serves no models for this path."
        response = error_response(http_error(error.status, words), context, path)
        for name in ("Allow", "Location"):
            if name in error.headers:
                response.headers[name] = error.headers[name]
    except ConnectionResetError:
        raise asyncio.CancelledError from None  # a client that goes away is not a fault, and nobody reads an answer
    except Exception:
        # this request alone is at fault or unlucky; the loop and its neighbours go on
        log.exception("request %s failed inside the server", label)
        response = error_response(http_error(500, "Internal server error."), context, path)
    if has_begun(request) and not response.prepared:
        # a second answer inside the first would be worse than an end that clients notice
        assert request.transport is not None  # `has_begun` looked
        request.transport.abort()
        raise asyncio.CancelledError
    resource = request.match_info.route.resource
    route = "other" if resource is None else resource.canonical
    context.metrics.responses[route, f"{response.status // 100}xx"] += 1
    return response


def _options(request: web.Request, context: ApiContext) -> web.Response:
    """A browser's question beforehand, or anybody's what a path can do."""
    error = request.match_info.http_exception
    if error is not None and not isinstance(error, web.HTTPMethodNotAllowed):
        raise error
    methods = set(error.allowed_methods) if error is not None else {"POST"}
    asked = request.headers.get("Access-Control-Request-Headers")
    headers = context.access.cors_headers(request.headers.get("Origin"), preflight=True, asked_headers=asked)
    return web.Response(status=204, headers={"Allow": ", ".join(sorted(methods | {"OPTIONS"})), **headers})


def has_begun(request: web.Request) -> bool:
    """Whether bytes of an answer are already on their way."""
    return request.transport is not None and request.writer.output_size > 0


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Answers `Expect: 100-continue`; any other expectation is refused in the envelope."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return error_response(http_error(417, "The expectation cannot be met."), request.app[CONTEXT], request.path)
    if request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # this was not the answer
    return None


async def _last_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs before the headers of any response go out, streams included."""
    response.headers[REQUEST_ID_HEADER] = request_label(request)
    response.headers["Server"] = "nanoserve"  # no versions of libraries for whoever asks
    response.headers.update(request.app[CONTEXT].access.cors_headers(request.headers.get("Origin")))
    if request.version < HttpVersion11 and response.content_length is None:
        response.force_close()  # nothing else can end this body, also where the client asked to keep the connection


def build_app(context: ApiContext) -> web.Application:
    app = web.Application(middlewares=[outcome_middleware], client_max_size=context.config.api.max_body_bytes)
    app[CONTEXT] = context
    app.on_response_prepare.append(_last_headers)
    for prefix in {"", context.root_path}:
        for method, path, handler in ROUTES:
            if method == "GET":
                app.router.add_get(prefix + path, handler, expect_handler=_expect)  # and HEAD
            else:
                app.router.add_route(method, prefix + path, handler, expect_handler=_expect)
    return app


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", create_completion),
    ("POST", "/v1/chat/completions", create_chat_completion),
    ("POST", "/v1/chat/completions/render", control.render),
    ("POST", "/v1/responses", create_response),
    ("POST", "/v1/messages", create_message),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/generate", generate),
    ("PUT", "/generate", generate),
    ("POST", "/abort_request", control.abort_request),
    ("POST", "/flush_cache", control.flush_cache),
    ("POST", "/pause_generation", control.pause_generation),
    ("POST", "/continue_generation", control.continue_generation),
    ("POST", "/start_profile", control.start_profile),
    ("POST", "/stop_profile", control.stop_profile),
    ("POST", "/configure_logging", control.configure_logging),
    ("GET", "/health_generate", control.health_generate),
    ("GET", "/v1/loads", control.loads),
    ("GET", "/model_info", control.model_info),
    ("GET", "/get_model_info", control.model_info),
    ("GET", "/v1/models", ops.list_models),
    ("GET", "/v1/models/{name:.+}", ops.get_model),
    ("GET", "/health", ops.health),
    ("GET", "/ping", ops.health),
    ("GET", "/ready", ops.ready),
    ("GET", "/version", ops.version),
    ("GET", "/openapi.json", openapi),
    ("GET", "/metrics", ops.metrics),
    ("GET", "/server_info", ops.server_info),
    ("GET", "/get_server_info", ops.server_info),
    ("POST", "/tokenize", ops.tokenize),
    ("POST", "/detokenize", ops.detokenize),
    ("POST", "/v1/tokenize", ops.tokenize),
    ("POST", "/v1/detokenize", ops.detokenize),
)
