"""Everything that is not generation: models, health, readiness, version, tokenizer, metrics, server facts.

Owner process: api. Health never waits for the tokenizer's threads or a forward pass.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import web

from nanoserve import __version__
from nanoserve.api.chat import render_chat
from nanoserve.api.context import CONTEXT, ApiContext
from nanoserve.api.http import json_response, read_json, warning_headers
from nanoserve.api.model import ServedModel
from nanoserve.api.peer_answers import counts
from nanoserve.api.pieces import token_pieces
from nanoserve.api.prompt import refuse_by_length
from nanoserve.api.schemas import MAX_COMMAS_WITH_IDS, BodyDecoder, DetokenizeBody, TokenizeBody
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import ApiReply, ApiTask, ProcessFacts

_TOKENIZE = BodyDecoder(TokenizeBody)
_DETOKENIZE = BodyDecoder(DetokenizeBody, unsupported={}, max_commas=MAX_COMMAS_WITH_IDS)
_MAX_DETOKENIZE = 1 << 20
_SECRETS = ("key", "token_file", "password")


async def health(request: web.Request) -> web.Response:
    """Liveness: 200 unless the server has failed or a process is dead or stuck, as the supervisor sees it."""
    lifecycle = request.app[CONTEXT].lifecycle
    if lifecycle.status.failed:
        return json_response({"status": "failed", "reason": lifecycle.status.failed}, status=503)
    if sick := lifecycle.sick_processes():
        return json_response({"status": "unhealthy", "processes": sick}, status=503)
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """Readiness: 200 when a new request would be taken now; also while paused, for then it waits and is not lost."""
    context = request.app[CONTEXT]
    if context.lifecycle.is_ready:
        return json_response(_readiness(context))
    return json_response(_readiness(context), status=503, headers={"Retry-After": "2"})


def _readiness(context: ApiContext) -> dict[str, Any]:
    """`paused` is the engine's own word, so it holds whichever api process was asked to pause."""
    return {**context.lifecycle.readiness(), "paused": context.metrics.engine_stats.paused}


async def version(request: web.Request) -> web.Response:
    return json_response({"version": __version__})


def model_card(model: ServedModel, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "nanoserve",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
    }


async def list_models(request: web.Request) -> web.Response:
    model = request.app[CONTEXT].lifecycle.require_model()
    return json_response({"object": "list", "data": [model_card(model, name) for name in model.names]})


async def get_model(request: web.Request) -> web.Response:
    model = request.app[CONTEXT].lifecycle.require_model()
    name = request.match_info["name"]
    if name not in model.names:
        raise RequestError("The requested model does not exist.", status=404, param="model", code="model_not_found")
    return json_response(model_card(model, name))


async def metrics(request: web.Request) -> web.Response:
    """The whole server's figures, whichever api process is asked."""
    context = request.app[CONTEXT]
    by_process = None
    if context.peers.are_many:
        by_process = {f"api-{reply.answerer}": reply.metrics for reply in await _counts_of_all(context)}
    body = context.metrics.render(by_process)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _counts_of_all(context: ApiContext) -> list[ApiReply]:
    """This process's counts and those of the others that answer, in the order of their index."""
    others, _ = await context.peers.ask_all(ApiTask.COUNTS)
    return sorted([counts(context), *others], key=lambda reply: reply.answerer)


async def tokenize(request: web.Request) -> web.Response:
    """Ids of a text, or of messages through the chat template."""
    context = request.app[CONTEXT]
    model = context.lifecycle.require_model()
    decoded = await read_json(request, _TOKENIZE)
    body = decoded.body
    _check_name(context, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("Give either `prompt` or `messages`.", param="prompt")
    if body.prompt is not None:
        text, add_special = body.prompt, body.add_special_tokens is not False
    else:
        text = await render_chat(
            context,
            model,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            kwargs=body.chat_template_kwargs,
        )
        add_special = body.add_special_tokens is True
    if len(text) > 1 << 20:
        refuse_by_length(text, model)
    encoder = context.lifecycle.require_encoder()
    (ids,) = await encoder.encode([text], add_special_tokens=add_special)
    # in a thread: a megabyte of text is a tenth of a second of work, with the JSON of it
    answer = await encoder.run(lambda: _shown_tokens(model, ids, body))
    headers = warning_headers(decoded.unknown_keys)
    return web.Response(body=answer, content_type="application/json", headers=headers)


def _shown_tokens(model: ServedModel, ids: list[int], body: TokenizeBody) -> bytes:
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [model.tokenizer.id_to_token(token_id) for token_id in ids]
    if body.with_pieces:
        pieces = token_pieces(model.tokenizer, ids)
        answer["tokens"] = [{"id": token_id, "piece": piece} for token_id, piece in zip(ids, pieces, strict=True)]
    return msgspec.json.encode(answer)


async def detokenize(request: web.Request) -> web.Response:
    """The text of ids; ids without a token are a 400."""
    context = request.app[CONTEXT]
    model = context.lifecycle.require_model()
    decoded = await read_json(request, _DETOKENIZE)
    body = decoded.body
    _check_name(context, body.model)
    ids = body.tokens
    if ids is None:
        raise RequestError("`tokens` must be given.", param="tokens")
    if len(ids) > _MAX_DETOKENIZE:
        raise RequestError(f"`tokens` may hold at most {_MAX_DETOKENIZE} ids.", param="tokens")
    if ids and (min(ids) < 0 or max(ids) >= model.vocab_size):
        raise RequestError(f"`tokens` has an id outside [0, {model.vocab_size - 1}].", param="tokens")
    skip = bool(body.skip_special_tokens)
    text = await context.lifecycle.require_encoder().run(lambda: model.tokenizer.decode(ids, skip_special_tokens=skip))
    return json_response({"prompt": text, "text": text}, headers=warning_headers(decoded.unknown_keys))


async def server_info(request: web.Request) -> web.Response:
    """Configuration without secrets, processes, engine facts, last stats."""
    context = request.app[CONTEXT]
    status = context.lifecycle.status
    stats = context.metrics.engine_stats
    engine = msgspec.to_builtins(_named(stats))
    apis = await _counts_of_all(context)
    return json_response(
        {
            "version": __version__,
            "pid": os.getpid(),
            "time": time.time(),
            "status": _readiness(context),
            "model": context.lifecycle.model.name if context.lifecycle.model else None,
            "config": without_secrets(asdict(context.config)),
            "engine": _named(status.engine) if status.engine is not None else None,
            "processes": [_process(process, context) for process in status.processes],
            "engine_stats": engine,
            "detok_stats": _named(context.metrics.detok_stats),
            "api": {
                "live_requests": sum(reply.live_requests for reply in apis),
                "open_streams": sum(reply.open_streams for reply in apis),
            },
            "apis": [
                {
                    "name": f"api-{reply.answerer}",
                    "live_requests": reply.live_requests,
                    "open_streams": reply.open_streams,
                }
                for reply in apis
            ],
            "internal_states": [engine],
        }
    )


def _process(facts: ProcessFacts, context: ApiContext) -> dict[str, Any]:
    """Memory is what the process itself wrote down last: bytes by owner, which add up to `rss`."""
    return _named(facts) | {
        "uptime_s": round((time.monotonic_ns() - facts.started_ns) / 1e9, 1),
        "restarts": facts.incarnation - 1,
        "memory": context.memory(facts.name),
    }


def _named(struct: msgspec.Struct) -> dict[str, Any]:
    """A positional struct as an object with names."""
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def without_secrets(tree: Any) -> Any:
    """The configuration with the values of secret-looking keys replaced."""
    if not isinstance(tree, dict):
        return tree
    return {
        name: "***" if value and any(word in name for word in _SECRETS) else without_secrets(value)
        for name, value in tree.items()
    }


def _check_name(context: ApiContext, name: str | None) -> None:
    if context.checker is not None:
        context.checker.check_model_name(name)
