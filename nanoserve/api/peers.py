"""The other api processes of this server: what is asked of one of them and concerns all is asked of the others too.

Owner process: api; with `--api-workers` above 1. Calls and replies travel over the api processes' inboxes, straight
from one to the other. A process that does not answer in time is left out by name, so nobody waits long for a stuck one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import count
from typing import Any

from nanoserve.errors import RequestError
from nanoserve.ipc.messages import ApiCall, ApiReply, ApiTask, Failure, ProcessFacts

ANSWER_S = 1.0  # a process that turns its loop answers within milliseconds
Answer = Callable[[ApiCall], Awaitable[ApiReply]]


class Peers:
    """This process among its like. `send` has one function for each of the others, by index."""

    def __init__(
        self,
        index: int,
        send: Mapping[int, Callable[[ApiCall | ApiReply], object]],
        clock_ns: Callable[[], int],
    ) -> None:
        self.index = index
        self._send = send
        self._clock_ns = clock_ns
        # from the clock: an answer that an earlier life of this process has asked for is nobody's here, and not the one
        # of an equal number, which may be another client's
        self._numbers = count(clock_ns())
        self._waiting: dict[int, tuple[int, asyncio.Future[ApiReply | None]]] = {}  # by number: asked whom
        self._answering: set[asyncio.Task[None]] = set()
        self.living: frozenset[int] = frozenset()

    @property
    def are_many(self) -> bool:
        """Whether this server has several api processes, alive or not."""
        return bool(self._send)

    @property
    def num_waiting(self) -> int:
        """Calls that have no answer yet."""
        return len(self._waiting)

    def note_processes(self, processes: Iterable[ProcessFacts]) -> None:
        """Who is there to be asked: what is sent to a dead one would only pile up. Who waits for it waits no more."""
        states = {facts.name: facts.state for facts in processes}
        self.living = frozenset(index for index in self._send if states.get(f"api-{index}") == "ready")
        for index, waiter in self._waiting.values():
            if states.get(f"api-{index}") not in ("ready", "stalled") and not waiter.done():
                waiter.set_result(None)

    async def ask(self, index: int, task: ApiTask, *, patience_s: float = 0.0, **fields: Any) -> ApiReply | None:
        """One process's answer, which may wait for news so long; None when it is not there or does not answer."""
        if index not in self.living:
            return None
        number = next(self._numbers)
        reply: asyncio.Future[ApiReply | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (index, reply)
        try:
            call = ApiCall(self.index, number, task, self._clock_ns(), patience_s=patience_s, **fields)
            self._send[index](call)
            return await asyncio.wait_for(reply, ANSWER_S + patience_s)
        except TimeoutError:
            return None
        finally:
            del self._waiting[number]

    async def ask_all(self, task: ApiTask, **fields: Any) -> tuple[list[ApiReply], list[str]]:
        """The answers of all the others, and the names of those that live and have not answered."""
        asked = sorted(self.living)
        replies = await asyncio.gather(*(self.ask(index, task, **fields) for index in asked))
        silent = [f"api-{index}" for index, reply in zip(asked, replies, strict=True) if reply is None]
        return [reply for reply in replies if reply is not None], silent

    def take_reply(self, reply: ApiReply) -> None:
        """Hands it to whoever waits; one that comes too late has nobody."""
        _, waiter = self._waiting.get(reply.number, (0, None))
        if waiter is not None and not waiter.done():
            waiter.set_result(reply)

    def take_call(self, call: ApiCall, answer: Answer) -> None:
        """Answers in a task of its own. A call to an earlier life of this process is as old as nobody waits for."""
        if self._clock_ns() - call.sent_ns > ANSWER_S * 1e9 or call.asker not in self._send:
            return
        task = asyncio.get_running_loop().create_task(self._answer(call, answer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, call: ApiCall, answer: Answer) -> None:
        try:
            reply = await answer(call)
        except RequestError as error:
            failure = Failure(error.status, error.message, error.param, error.error_type, error.code)
            reply = ApiReply(answerer=self.index, number=call.number, failure=failure)
        self._send[call.asker](reply)

    def close(self) -> None:
        for task in self._answering:
            task.cancel()
