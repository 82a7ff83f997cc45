"""GET /openapi.json: what the routes take and answer, from the same structs that decode the bodies.

Owner process: api. Built once, on the first request.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from nanoserve import __version__
from nanoserve.api import bounds
from nanoserve.api.access import ADMIN_PATHS
from nanoserve.api.context import CONTEXT
from nanoserve.api.messages import MessagesBody
from nanoserve.api.responses import ResponsesBody
from nanoserve.api.schemas import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    LoggingBody,
    PauseBody,
    ProfileBody,
    TokenizeBody,
)

_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXT_OR_LIST = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
_IDS_OR_LIST = [_IDS, {"type": "array", "items": _IDS}]
_RAW_FIELDS = {
    ("CompletionBody", "prompt"): {"anyOf": [*_TEXT_OR_LIST, *_IDS_OR_LIST]},
    ("GenerateBody", "text"): {"anyOf": [*_TEXT_OR_LIST, {"type": "null"}]},
    ("GenerateBody", "input_ids"): {"anyOf": [*_IDS_OR_LIST, {"type": "null"}]},
    ("GenerateBody", "sampling_params"): {"anyOf": [{"type": "object"}, {"type": "null"}]},
}
_Body = type[msgspec.Struct] | None
_POSTS: dict[str, tuple[_Body, str, bool]] = {  # path: body, summary, may stream
    "/v1/completions": (CompletionBody, "Complete a prompt.", True),
    "/v1/chat/completions": (ChatBody, "Answer a conversation.", True),
    "/v1/chat/completions/render": (ChatBody, "The prompt of a conversation, as text and ids.", False),
    "/v1/responses": (ResponsesBody, "Answer in the Responses protocol.", True),
    "/v1/messages": (MessagesBody, "Answer in the Messages protocol.", True),
    "/v1/messages/count_tokens": (MessagesBody, "Count the tokens of a conversation.", False),
    "/generate": (GenerateBody, "Text or ids in, text and ids out.", True),
    "/tokenize": (TokenizeBody, "Text to ids.", False),
    "/detokenize": (DetokenizeBody, "Ids to text.", False),
    "/v1/tokenize": (TokenizeBody, "Text to ids.", False),
    "/v1/detokenize": (DetokenizeBody, "Ids to text.", False),
    "/flush_cache": (None, "Forget cached prefixes.", False),
    "/pause_generation": (PauseBody, "Compute nothing until told to go on.", False),
    "/continue_generation": (PauseBody, "Go on after a pause.", False),
    "/start_profile": (ProfileBody, "Record the engine's next steps as a trace.", False),
    "/stop_profile": (None, "End the profile that runs.", False),
    "/configure_logging": (LoggingBody, "Change what the api processes log.", False),
    "/abort_request": (AbortBody, "End requests by the id their clients gave.", False),
}
_GETS = {
    "/v1/models": "The served model under each of its names.",
    "/v1/models/{id}": "One name of the served model.",
    "/v1/loads": "Load figures.",
    "/metrics": "Counts and times for Prometheus.",
    "/health": "Whether every process is alive.",
    "/ping": "Whether every process is alive.",
    "/ready": "Whether a new request would be served now.",
    "/health_generate": "Whether a token goes round the ring.",
    "/version": "The version.",
    "/server_info": "Configuration, processes, stats.",
    "/get_server_info": "Configuration, processes, stats.",
    "/model_info": "Facts of the model.",
    "/get_model_info": "Facts of the model.",
    "/openapi.json": "This description.",
}
_TEXT = {"text/plain": {"schema": {"type": "string"}}}
_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
_STATUSES = {
    "400": "something in the request is wrong",
    "401": "the API key is missing or wrong",
    "403": "the page's origin may not act on the server",
    "404": "no such model",
    "405": "the path does not take this method",
    "408": "the body came too slowly",
    "409": "one is running, and there is one at a time",
    "410": "the stream of this `Last-Event-ID` cannot be resumed from there",
    "413": "the body is too large",
    "415": "the body's encoding is not one that is read",
    "417": "the expectation cannot be met",
    "429": "too many requests",
    "431": "headers or path are too large",
    "500": "the server is at fault",
    "503": "not ready, draining or full; see Retry-After",
}


async def openapi(request: web.Request) -> web.Response:
    context = request.app[CONTEXT]
    body = _document(context.config.served_names, context.root_path)
    return web.Response(body=body, content_type="application/json")


@cache
def _document(names: tuple[str, ...], root_path: str) -> bytes:
    bodies = list(dict.fromkeys(body for body, _, _ in _POSTS.values() if body is not None))
    _, schemas = msgspec.json.schema_components(bodies, ref_template="#/components/schemas/{name}")
    for (struct, field), schema in _RAW_FIELDS.items():
        schemas[struct]["properties"][field] = schema
    for struct, schema in schemas.items():
        for field, described in schema["properties"].items():
            bounds.tell(struct, field, described)
        if "model" in schema["properties"]:
            schema["properties"]["model"] = {"enum": [*names, None], "default": None}
    schemas["Error"] = {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"type": "integer"},
                    "error_code": {"type": "string"},
                },
            }
        },
    }
    paths: dict[str, Any] = {path: {"get": _operation(path, words, None, False)} for path, words in _GETS.items()}
    paths |= {path: {"post": _operation(path, *_turned(entry))} for path, entry in _POSTS.items()}
    paths["/generate"]["put"] = paths["/generate"]["post"]
    paths["/v1/models/{id}"]["parameters"] = [_ID]
    document = {
        "openapi": "3.1.0",
        "info": {"title": "nanoserve", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {"schemas": schemas},
    }
    return msgspec.json.encode(document)


def _turned(entry: tuple[_Body, str, bool]) -> tuple[str, str | None, bool]:
    body, words, streams = entry
    return words, body.__name__ if body is not None else None, streams


def _operation(path: str, words: str, body: str | None, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if path == "/metrics":
        content = _TEXT
    elif path == "/generate":
        content = {"application/json": {"schema": {"type": ["object", "array"]}}}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "done", "content": content}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    if path in ("/health", "/ping", "/ready"):
        responses["503"] = {"description": "no", "content": {"application/json": {"schema": {"type": "object"}}}}
    else:
        responses |= {status: {"description": text, "content": error} for status, text in _STATUSES.items()}
    operation: dict[str, Any] = {"summary": words, "responses": responses}
    if body is not None:
        schema = {"$ref": f"#/components/schemas/{body}"}
        required = path not in ADMIN_PATHS
        operation["requestBody"] = {"required": required, "content": {"application/json": {"schema": schema}}}
    return operation
