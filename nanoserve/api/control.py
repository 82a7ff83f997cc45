"""Paths that look into the ring or act on it: render, generate-health, loads, abort, flush, pause, profile, logging.

Owner process: api. Paths that change something are in `access.ADMIN_PATHS`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable
from functools import partial
from typing import TypeVar

from aiohttp import web

from nanoserve.api.chat import encode_chat
from nanoserve.api.context import CONTEXT, ApiContext
from nanoserve.api.errors import Unavailable, http_error
from nanoserve.api.http import json_response, read_body, read_json, warning_headers
from nanoserve.api.probe import one_token_round
from nanoserve.api.request_log import MAX_LEVEL
from nanoserve.api.schemas import AbortBody, BodyDecoder, ChatBody, LoggingBody, PauseBody, ProfileBody
from nanoserve.errors import RequestError
from nanoserve.ipc.messages import ApiTask, FlushCache, LogChoice, Pause, StartProfile, StopProfile

T = TypeVar("T")

_CHAT = BodyDecoder(ChatBody)
_PAUSE = BodyDecoder(PauseBody, unsupported={}, may_be_empty=True)
_ABORT = BodyDecoder(AbortBody, unsupported={}, may_be_empty=True)
_LOGGING = BodyDecoder(  # another server's fields for keeping whole requests: texts are nothing that we write
    LoggingBody,
    unsupported=dict.fromkeys(("dump_requests_folder", "dump_requests_threshold", "log_requests_format"), ()),
    may_be_empty=True,
)
_PROFILE = BodyDecoder(
    ProfileBody,
    unsupported={"output_dir": (), "start_step": (), "profile_by_stage": (False,)},
    may_be_empty=True,
)
_MAX_PROFILE_STEPS = 10_000  # a file of 10 MB
_LOG_LEVELS = ("debug", "info", "warning", "error")
_GENERATE_LIMIT_S = 20.0
_ENGINE_LIMIT_S = 20.0  # the engine looks at its messages between steps, and one with a long prompt takes its time


async def render(request: web.Request) -> web.Response:
    """The prompt a chat request would get, as text and ids, without running it."""
    context = request.app[CONTEXT]
    model = context.lifecycle.require_model()
    decoded = await read_json(request, _CHAT)
    if context.checker is not None:
        context.checker.check_model_name(decoded.body.model)
    prompt = await encode_chat(context, model, decoded.body, None)
    shown = {"prompt": prompt.text, "prompt_token_ids": prompt.ids, "count": len(prompt.ids)}
    return json_response(shown, headers=warning_headers(decoded.unknown_keys))


async def health_generate(request: web.Request) -> web.Response:
    """200 when one token has gone through engine and detokenizer just now."""
    context = request.app[CONTEXT]
    context.lifecycle.require_ready()
    try:
        async with asyncio.timeout(_GENERATE_LIMIT_S):
            await one_token_round(context.client, [0])
    except TimeoutError:
        raise Unavailable(f"No token came round within {_GENERATE_LIMIT_S:g} s.", code="unhealthy") from None
    except RequestError as error:
        raise Unavailable(f"A request of one token was refused: {error.message}", code="unhealthy") from None
    return json_response({"status": "ok"})


async def loads(request: web.Request) -> web.Response:
    """Load figures for routers."""
    context = request.app[CONTEXT]
    stats = context.metrics.engine_stats
    eta_s = context.admission.seconds_for(stats.num_waiting, context.clock_s()) if stats.num_waiting else 0.0
    return json_response(
        {
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "kv_used": stats.blocks_used,
            "kv_total": stats.blocks_total,
            "queue_eta_s": round(eta_s, 3),
            "paused": stats.paused,
        }
    )


async def model_info(request: web.Request) -> web.Response:
    """What benchmark clients of other servers ask for."""
    context = request.app[CONTEXT]
    model = context.lifecycle.require_model()
    return json_response(
        {
            "model_path": context.config.model.model,
            "tokenizer_path": context.config.model.tokenizer or context.config.model.model,
            "is_generation": True,
            "served_model_names": list(model.names),
            "max_model_len": model.max_model_len,
            "vocab_size": model.vocab_size,
        }
    )


async def abort_request(request: web.Request) -> web.Response:
    """Ends requests by the exact id their clients gave, or all of them, in every api process."""
    context = request.app[CONTEXT]
    decoded = await read_json(request, _ABORT)
    body = decoded.body
    label = body.rid or body.request_id
    if not label and not body.abort_all:
        raise RequestError("Give a `rid`, or `abort_all`.", param="rid")
    labels = None if body.abort_all else [str(label)]
    ended = context.pacer.abort(None if labels is None else set(labels))
    others, silent = await context.peers.ask_all(ApiTask.ABORT, labels=labels)
    ended.update(*(reply.aborted for reply in others))
    unknown = [name for name in labels or [] if name not in ended]
    if silent and (unknown or labels is None):
        words = f"{', '.join(silent)} did not answer; its requests may go on."
        raise Unavailable(words, retry_after_s=1.0, code="unavailable")
    shown = {"aborted": sorted(ended), "unknown": unknown}
    return json_response(shown, headers=warning_headers(decoded.unknown_keys))


async def flush_cache(request: web.Request) -> web.Response:
    """Forgets every cached prefix that no running request uses, and says how many blocks that was."""
    context = request.app[CONTEXT]
    context.lifecycle.require_ready()
    num_blocks = await _within_limit(context.metrics.flushed(partial(context.client.tell, FlushCache())))
    stats = context.metrics.engine_stats
    return json_response({"status": "ok", "freed_blocks": num_blocks, "running": stats.num_running})


async def pause_generation(request: web.Request) -> web.Response:
    """The engine computes nothing until it is told to go on; requests are taken and wait where they are."""
    return await _set_paused(request, True)


async def continue_generation(request: web.Request) -> web.Response:
    return await _set_paused(request, False)


async def _set_paused(request: web.Request, paused: bool) -> web.Response:
    context = request.app[CONTEXT]
    context.lifecycle.require_ready()
    decoded = await read_json(request, _PAUSE)
    if decoded.body.mode not in (None, "in_place"):
        raise RequestError("`mode` must be in_place: requests are neither ended nor sent back.", param="mode")
    context.client.tell(Pause(paused))
    return json_response({"status": "ok", "paused": paused}, headers=warning_headers(decoded.unknown_keys))


async def start_profile(request: web.Request) -> web.Response:
    """The engine records its next `num_steps` steps, or until it is told to stop; answers with the file to come."""
    context = request.app[CONTEXT]
    context.lifecycle.require_ready()
    decoded = await read_json(request, _PROFILE)
    num_steps = _MAX_PROFILE_STEPS if decoded.body.num_steps is None else decoded.body.num_steps
    if not 1 <= num_steps <= _MAX_PROFILE_STEPS:
        raise RequestError(f"`num_steps` must be in [1, {_MAX_PROFILE_STEPS}].", param="num_steps")
    number = 1 + secrets.randbits(31)
    file = _profile_file(context, number)
    begin = partial(context.client.tell, StartProfile(number, num_steps, file))
    has_begun = await _within_limit(context.metrics.profile_begins(number, begin))
    if not has_begun:
        raise http_error(409, "A profile is running; the engine makes one at a time.")
    shown = {"status": "ok", "num_steps": num_steps, "file": file}
    return json_response(shown, headers=warning_headers(decoded.unknown_keys))


async def stop_profile(request: web.Request) -> web.Response:
    """Ends the profile that runs with the steps it has; `file` is null where none runs."""
    context = request.app[CONTEXT]
    context.lifecycle.require_ready()
    number = await _within_limit(context.metrics.profile_ends(partial(context.client.tell, StopProfile())))
    return json_response({"status": "ok", "file": _profile_file(context, number) if number else None})


async def _within_limit(answer: Awaitable[T]) -> T:
    """The engine's answer; Unavailable where it does not come in time."""
    try:
        async with asyncio.timeout(_ENGINE_LIMIT_S):
            return await answer
    except TimeoutError:
        raise Unavailable(f"The engine did not answer within {_ENGINE_LIMIT_S:g} s.", code="unavailable") from None


def _profile_file(context: ApiContext, number: int) -> str:
    return str(context.log_dir.absolute() / f"profile-{number}.json")


async def configure_logging(request: web.Request) -> web.Response:
    """Changes what the api processes log, all of them, until they restart. Unknown fields are refused."""
    context = request.app[CONTEXT]
    body = _LOGGING.decode(await read_body(request), strict=True).body
    if body.log_requests_level is not None and not 0 <= body.log_requests_level <= MAX_LEVEL:
        words = f"`log_requests_level` must be in [0, {MAX_LEVEL}]: prompts and answers are never logged."
        raise RequestError(words, param="log_requests_level")
    if body.log_level is not None and body.log_level not in _LOG_LEVELS:
        raise RequestError(f"`log_level` must be one of {', '.join(_LOG_LEVELS)}.", param="log_level")
    choice = LogChoice(body.log_requests, body.log_requests_level, body.log_level or "")
    context.request_log.choose(choice)
    _, silent = await context.peers.ask_all(ApiTask.LOGGING, logging=choice)
    if silent:
        words = f"{', '.join(silent)} did not answer and may log as before."
        raise Unavailable(words, retry_after_s=1.0, code="unavailable")
    log = context.request_log
    return json_response({"status": "ok", "log_requests": log.is_on, "log_requests_level": log.level})
