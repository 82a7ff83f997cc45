"""The engine without its process: messages in, one `TokenBatch` a step out. No sockets; time comes from `clock`.

Used by `engine.process` (over ZMQ), by `nanoserve.LLM` (in memory) and by tests. Every request that comes in leaves
`Opened` first and `Finished` last on the way to the detokenizer, each once, whatever happens between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from nanoserve.engine.ledger import Ledger
from nanoserve.engine.outbox import BatchBuilder, prompt_logprobs
from nanoserve.engine.stats import EngineCounters
from nanoserve.errors import RequestError
from nanoserve.ipc.columns import pack_ids, unpack_ids
from nanoserve.ipc.ids import api_index, belongs_to_life
from nanoserve.ipc.messages import (
    PROBE_PRIORITY,
    AbortCause,
    AbortRequest,
    Accepted,
    AddRequest,
    ApiGone,
    EngineInbox,
    EngineStats,
    Failure,
    Finished,
    FinishReason,
    FlushCache,
    Opened,
    Pause,
    Release,
    Resync,
    StartProfile,
    StopProfile,
    TokenBatch,
)
from nanoserve.sched.fairness import FairShares
from nanoserve.sched.plan import Executor, StepPlan
from nanoserve.sched.request import Request, StepOutput
from nanoserve.sched.scheduler import Scheduler

_PROGRESS_NS = 1_000_000_000  # between two words to a client that waits for its first token
_log = logging.getLogger(__name__)


class MessageSource(Protocol):
    """Where messages wait; `ipc.channels.Inbox`, or a queue in memory."""

    @property
    def dropped(self) -> int:
        """Messages that could not be decoded."""
        ...

    def drain(self) -> Sequence[EngineInbox]:
        """Takes all that waits, without sleeping."""
        ...


class MemoryInbox:
    """Messages from the same process: offline use and tests."""

    def __init__(self) -> None:
        self.dropped = 0
        self._queue: deque[EngineInbox] = deque()

    def put(self, message: EngineInbox) -> None:
        self._queue.append(message)

    def drain(self) -> list[EngineInbox]:
        messages = list(self._queue)
        self._queue.clear()
        return messages


class EngineCore:
    """Joins scheduler, executor and ledger. The loop around it: `receive`, send `take_news`, send `step`."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inbox: MessageSource,
        *,
        engine_index: int,
        incarnation: int,
        clock: Callable[[], int],
        refuse: Callable[[AddRequest], RequestError | None] = lambda message: None,
    ) -> None:
        self.scheduler = scheduler
        self.counters = EngineCounters()
        self.ledger = Ledger()
        self._executor = executor
        self._inbox = inbox
        self._clock = clock
        self._refuse = refuse
        self._builder = BatchBuilder(engine_index, incarnation, clock)
        self._postponed: list[Resync] = []
        self._gone: dict[int, int] = {}  # api index -> last life that has ended
        self._in_step = False
        self._last_step_failed = False
        self.paused = False
        self._progress_ns = 0  # when waiting clients were last told
        limits = scheduler.limits
        num_places = limits.max_num_seqs + limits.max_num_queued
        self._shares = FairShares(num_places, clock()) if limits.policy == "fair" else None

    @property
    def has_work(self) -> bool:
        """Whether a step is of use; never while paused."""
        return not self.paused and (self.scheduler.has_work or bool(self._postponed))

    # ---- messages ----------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Handles all that waits in the inbox."""
        postponed, self._postponed = self._postponed, []
        for message in [*postponed, *self._inbox.drain()]:
            self.handle(message)

    def handle(self, message: EngineInbox) -> None:
        match message:
            case AddRequest():
                self._add(message)
            case AbortRequest():
                finished = self.scheduler.abort(message.request_ids, message.cause, self._clock(), message.num_kept)
                self.counters.dropped_messages += len(message.request_ids) - len(finished)
                if self._in_step and message.cause is AbortCause.STOP_STRING:
                    self.counters.stop_overrun_rows += len(finished)
                self._finish(finished)
            case Release():
                # Whoever has the terminal record of a request that still runs (from a detokenizer that died before
                # it could tell us) wants no more of it.
                live = [request_id for request_id in message.request_ids if self.ledger.release(request_id)]
                self._finish(self.scheduler.abort(live, AbortCause.CLIENT_GONE, self._clock()))
            case Resync():
                self._resync(message)
            case FlushCache():
                self.counters.flushed_blocks += self.scheduler.tables.pool.forget_free()
                self.counters.num_flushes += 1
                self._builder.stats_due = True
            case Pause():
                self.paused = message.paused
                self._builder.stats_due = True
            case StartProfile():
                self.counters.begin_profile(message)
                self._builder.stats_due = True
            case StopProfile():
                self.counters.end_profile()
                self._builder.stats_due = True
            case ApiGone():
                self._gone[message.api_index] = message.incarnation
                self.handle(
                    Release([request_id for request_id in self.ledger.request_ids() if self._is_gone(request_id)])
                )

    def _is_gone(self, request_id: int) -> bool:
        incarnation = self._gone.get(api_index(request_id))
        return incarnation is not None and belongs_to_life(request_id, api_index(request_id), incarnation)

    def _add(self, message: AddRequest) -> None:
        request_id = message.request_id
        if request_id in self.ledger or self._is_gone(request_id):
            self.counters.dropped_messages += 1  # delivered twice, or its api process died with this on the way
            return
        try:
            prompt_ids, output_ids = unpack_ids(message.prompt_token_ids), unpack_ids(message.output_token_ids)
        except ValueError:
            prompt_ids, output_ids = [], []  # refused below: an empty prompt
        self._builder.opened.append(Opened(request_id, message.text_spec, pack_ids(output_ids)))
        with_scores = message.sampling.logprobs is not None
        self.ledger.open(request_id, message.text_spec, output_ids, with_scores=with_scores)
        request = Request(
            request_id,
            prompt_ids + output_ids,
            len(prompt_ids),
            message.sampling,
            priority=message.priority,
            cache_salt=message.cache_salt,
            share_key=message.share_key,
            arrival_ns=message.arrival_ns,
        )
        try:
            if (refusal := self._refuse(message)) is not None:
                raise refusal
            if self._shares is not None and message.priority != PROBE_PRIORITY:
                request.priority = self._shares.admit(
                    request_id,
                    message.share_key,
                    len(prompt_ids) + message.sampling.max_tokens,
                    num_siblings=message.num_siblings,
                    resumed=bool(output_ids),
                    arrival_ns=message.arrival_ns,
                )
            finished = self.scheduler.add(request, self._clock())
        except RequestError as error:
            self._finish([self._refusal(message, len(prompt_ids), error)], num_admitted=0)
            return
        if finished is not None:
            self._finish([finished])
        else:
            self._builder.accepted.append(Accepted(request_id, self.scheduler.queue_position(request_id)))

    def _refusal(self, message: AddRequest, num_prompt_tokens: int, error: RequestError) -> Finished:
        return Finished(
            message.request_id,
            FinishReason.ERROR,
            num_prompt_tokens=num_prompt_tokens,
            failure=Failure(error.status, error.message, error.param, error.error_type, error.code),
            arrival_ns=message.arrival_ns,
            finished_ns=self._clock(),
        )

    def _resync(self, message: Resync) -> None:
        """Tells whole stories again. Between `schedule` and `update` it waits: a batch holds one row a request."""
        if self._in_step:
            self._postponed.append(message)
            return
        replay = self.ledger.replay(message.request_ids)
        if message.request_ids:
            self.counters.dropped_messages += len(message.request_ids) - len(replay.opened)
        retold = {opened.request_id for opened in replay.opened}
        self._builder.opened = [opened for opened in self._builder.opened if opened.request_id not in retold]
        self._builder.finished = [end for end in self._builder.finished if end.request_id not in retold]
        self._builder.extend(
            opened=replay.opened,
            rows=replay.rows,
            prompt_logprobs=replay.prompt_logprobs,
            finished=replay.finished,
        )

    def _finish(self, finished: list[Finished], *, num_admitted: int | None = None) -> None:
        self.counters.num_ended += len(finished) if num_admitted is None else num_admitted
        for end in finished:
            self.ledger.finish(end)
            if self._shares is not None:
                num_used = end.num_prompt_tokens + end.num_output_tokens if end.scheduled_ns else 0
                self._shares.end(end.request_id, num_used)
        self._builder.extend(finished=finished)

    # ---- what goes out -----------------------------------------------------------------------------------

    def take_news(self) -> TokenBatch | None:
        """What is to be told before the next step: admissions, refusals, ends, resyncs. None: nothing."""
        return None if self._builder.is_empty else self._builder.take(self.scheduler.num_steps, self.stats())

    def heartbeat(self) -> TokenBatch:
        """A batch that carries stats. Of an idle engine it also proves that all books are closed."""
        if not self.has_work and not self.paused:
            self.scheduler.check_idle()
        self._retell_overdue(self._clock())
        return self._builder.take(self.scheduler.num_steps, self.stats())

    def _retell_overdue(self, now_ns: int) -> None:
        overdue = self.ledger.overdue(now_ns)
        if overdue:
            self._postponed.append(Resync(overdue))

    def stats(self) -> EngineStats:
        return self.counters.snapshot(
            self.scheduler,
            num_retained=self.ledger.num_retained,
            num_undecodable=self._inbox.dropped,
            paused=self.paused,
        )

    def step(self) -> TokenBatch | None:
        """Computes one step. None when there was nothing to compute.

        Messages that came meanwhile are handled before the result is taken in, so that a request which is over
        gets no further row. Raises what the executor raises when two steps in a row fail as a whole.
        """
        begin_ns = self._clock()
        plan = self.scheduler.schedule(begin_ns)
        planned_ns = self._clock()
        if self._shares is not None:
            for new in plan.new_requests:
                self._shares.started(new.request_id)
        self._in_step = True
        output = self._execute(plan)
        self._in_step = False
        scores = [prompt_logprobs(prompt) for prompt in output.prompt_scores]
        self.ledger.record(output, scores)
        self._builder.extend(rows=output.rows, prompt_logprobs=scores)
        self._finish(output.finished)
        end_ns = self._clock()
        self.counters.step_seconds += (end_ns - begin_ns) / 1e9
        self.counters.schedule_seconds += (planned_ns - begin_ns) / 1e9
        if end_ns - self._progress_ns >= _PROGRESS_NS:
            self._progress_ns = end_ns
            self._builder.accepted += [Accepted(*progress) for progress in self.scheduler.without_output()]
            self._retell_overdue(end_ns)
        if not plan.rows and self._builder.is_empty:
            return None
        return self._builder.take(plan.step, self.stats())

    def _execute(self, plan: StepPlan) -> StepOutput:
        failure = Failure(500, "The engine failed in a step of this request.", error_type="server_error")
        try:
            result = self._executor.execute(plan)
        except BaseException as error:
            # The seam between one request's fault and the process's: once, the requests of this step end with an
            # error; twice in a row, the executor is broken and so is this process. An interrupt goes on, but leaves
            # books that can be closed.
            output = self.scheduler.fail_step(plan, failure, self._clock())
            if self._last_step_failed or not isinstance(error, Exception):
                self._in_step = False
                self._finish(output.finished)
                raise
            _log.exception("step %d failed: its %d requests end with an error", plan.step, len(plan.rows))
            self._last_step_failed = True
            return output
        self._last_step_failed = False
        self.receive()
        self.counters.build_seconds += result.times.build_seconds
        self.counters.forward_seconds += result.times.forward_seconds
        self.counters.sample_seconds += result.times.sample_seconds
        return self.scheduler.update(plan, result, self._clock())

    def shut_down(self) -> TokenBatch | None:
        """Ends all live requests; the batch carries their terminal records."""
        self._finish(self.scheduler.abort(self.scheduler.live_ids(), AbortCause.SHUTDOWN, self._clock()))
        self.close()
        return self.take_news()

    def close(self) -> None:
        """Ends the executor; requests are left as they are."""
        self._executor.close()
