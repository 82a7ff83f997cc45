"""Reads a live stream event by event, each through the strict parser."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import aiohttp

from tests.sse_grammar import DONE, Event, SseParser

_TIMEOUT_S = 20.0


class EventReader:
    """The events of one answer, in order. Comments are in `comments`."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        self._parser = SseParser()
        self._ready: deque[Event] = deque()
        self.comments = self._parser.comments

    async def _read(self) -> None:
        data = await asyncio.wait_for(self._content.readany(), _TIMEOUT_S)
        assert data, "the stream is over"
        self._ready.extend(self._parser.feed(data))

    async def next(self) -> Event:
        """The next event; AssertionError when the stream is over instead."""
        while not self._ready:
            await self._read()
        return self._ready.popleft()

    async def next_json(self) -> dict[str, Any]:
        return (await self.next()).json

    async def until_comment(self, beginning: str = "") -> None:
        """Returns once a comment has come that begins so."""
        while not any(comment.startswith(beginning) for comment in self.comments):
            await self._read()

    async def rest(self) -> list[Event]:
        """All events up to the end of the body, the terminator too."""
        self._ready.extend(self._parser.feed(await asyncio.wait_for(self._content.read(), _TIMEOUT_S)))
        self._parser.close()
        events, self._ready = list(self._ready), deque()
        return events

    async def rest_json(self) -> list[dict[str, Any]]:
        """The same without the terminator, decoded."""
        return [event.json for event in await self.rest() if event.data != DONE]
