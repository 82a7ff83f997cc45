"""Dropped streams that go on through another api process than the one that makes them.

Owner process: api; used with `--resume-grace` and `--api-workers`. The kernel gives a reconnecting client to any
process, so the id of a stream names the one that has it, and this one fetches the events there, a piece at a time: a
client that reads slowly asks seldom, and nothing piles up on the way.
"""

from __future__ import annotations

import re

from aiohttp import web

from nanoserve.api.errors import Unavailable, from_failure
from nanoserve.api.http import new_id
from nanoserve.api.peers import Peers
from nanoserve.ipc.messages import ApiReply, ApiTask

_PATIENCE_S = 10.0
_STREAM_ID = re.compile(r"^stream-(\d{1,3})-")


def new_stream_id(peers: Peers) -> str:
    return new_id(f"stream-{peers.index}")


def home_of(event_id: str) -> int | None:
    """The api process that makes this stream; None for an id that names none."""
    match = _STREAM_ID.match(event_id)
    return int(match.group(1)) if match else None


async def follow_elsewhere(
    request: web.Request, peers: Peers, index: int, event_id: str, owner: str, headers: dict[str, str]
) -> web.StreamResponse:
    """Writes the events after `event_id`, until the end or until this client goes.

    RequestError as the other process says it. Where it falls silent later the connection is cut, and the client comes
    back.
    """
    stream_id, _, number = event_id.rpartition(":")
    reply = await _fetch(peers, index, event_id, owner, 0.0)
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    after = int(number)  # the other process has looked at it
    while True:
        if reply.events:
            await response.write(b"".join(reply.events))
            after += len(reply.events)
        if reply.is_over:
            break
        reply = await _fetch(peers, index, f"{stream_id}:{after}", owner, _PATIENCE_S)
    await response.write_eof()
    return response


async def _fetch(peers: Peers, index: int, event_id: str, owner: str, patience_s: float) -> ApiReply:
    reply = await peers.ask(index, ApiTask.EVENTS, patience_s=patience_s, event_id=event_id, owner=owner)
    if reply is None:
        raise Unavailable("The process that makes this stream does not answer.", retry_after_s=1.0, code="unavailable")
    if reply.failure is not None:
        raise from_failure(reply.failure)
    return reply
