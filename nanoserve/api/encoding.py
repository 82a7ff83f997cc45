"""Tokenizing and template rendering off the event loop, many waiting texts in one call.

Owner process: api. An idle encoder starts at once; texts that arrive while it works go together in its next call, so
batching costs no delay. Long texts have a thread of their own and do not hold up short ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from nanoserve.api.errors import Unavailable
from nanoserve.errors import RequestError
from nanoserve.tokenizer import Tokenizer

R = TypeVar("R")

_LONG_CHARS = 32_768
_RENDER_SECONDS = 10.0
_RENDER_THREADS = 4
_MAX_BATCH_CHARS = 1 << 20


@dataclass(slots=True)
class _Job:
    texts: Sequence[str]
    add_special_tokens: bool
    done: asyncio.Future[list[list[int]]]


class _Lane:
    """One thread and the jobs that wait for it."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: list[_Job] = []
        self._task: asyncio.Task[None] | None = None

    async def encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        loop = asyncio.get_running_loop()
        job = _Job(texts, add_special_tokens, loop.create_future())
        self._waiting.append(job)
        if self._task is None:
            self._task = loop.create_task(self._work())
        return await job.done

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                jobs = self._next_batch()
                try:
                    rows = await loop.run_in_executor(self._thread, _encode_jobs, self._tokenizer, jobs)
                except Exception as error:  # the library's errors have no common class; each waiter gets it
                    for job in jobs:
                        if not job.done.done():
                            job.done.set_exception(error)
                    continue
                for job, ids in zip(jobs, rows, strict=True):
                    if not job.done.done():
                        job.done.set_result(ids)
        finally:
            self._task = None

    def _next_batch(self) -> list[_Job]:
        """All that waits, up to a size that keeps one call short; at least one job."""
        size = 0
        taken: list[_Job] = []
        while self._waiting and (not taken or size < _MAX_BATCH_CHARS):
            job = self._waiting.pop(0)
            if job.done.cancelled():
                continue
            taken.append(job)
            size += sum(map(len, job.texts))
        return taken


def _encode_jobs(tokenizer: Tokenizer, jobs: Sequence[_Job]) -> list[list[list[int]]]:
    """One row of id lists per job; one library call per flag."""
    results: list[list[list[int]]] = [[] for _ in jobs]
    for flag in (True, False):
        chosen = [i for i, job in enumerate(jobs) if job.add_special_tokens is flag]
        texts = [text for i in chosen for text in jobs[i].texts]
        if len(texts) == 1:
            encoded = [tokenizer.encode(texts[0], add_special_tokens=flag)]
        elif texts:
            encoded = tokenizer.encode_batch(texts, add_special_tokens=flag)
        start = 0
        for i in chosen:
            end = start + len(jobs[i].texts)
            results[i] = encoded[start:end]
            start = end
    return results


class Encoder:
    """What handlers call. `close` once at the end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._short = _Lane(tokenizer, "encode")
        self._long = _Lane(tokenizer, "encode-long")
        self._render = ThreadPoolExecutor(max_workers=_RENDER_THREADS, thread_name_prefix="render")

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Ids of each text, in order."""
        lane = self._long if sum(map(len, texts)) > _LONG_CHARS else self._short
        return await lane.encode(texts, add_special_tokens)

    async def run(self, function: Callable[[], R]) -> R:
        """Runs a pure function (a template, a decode) in a thread, within a time limit."""
        work = self._render.submit(function)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), _RENDER_SECONDS)
        except TimeoutError:
            if work.cancelled():  # it never began: the others were slow, not this one
                raise Unavailable("The server is busy rendering other requests.") from None
            raise RequestError("The chat template takes too long on these messages.", param="messages") from None

    def close(self) -> None:
        self._short.close()
        self._long.close()
        self._render.shutdown(wait=False, cancel_futures=True)
