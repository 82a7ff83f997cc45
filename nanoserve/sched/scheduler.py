"""Who computes how many tokens in the next step. Pure; owned by the engine process, driven by `engine.core`.

    add ──► waiting ──schedule──► running ──update──► finished          (one terminal record, on every path)
               ▲                     │
               └──── preempted ◄─────┘      gives its blocks back, later computes prompt + output again

There are no modes: a request has `num_tokens` tokens, KV for `num_computed_tokens` of them, and a step computes some
of the difference. A long prompt in chunks, a prefix cache hit, a decode, a resumed or preempted request are all that.

`schedule` and `update` alternate; `add` and `abort` may come between them. Blocks of a request that ends while its row
is in a step are given back in `update`: only then has the step that may still write them ended.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from nanoserve.ipc.messages import AbortCause, Failure, Finished, FinishReason
from nanoserve.sched.admission import SchedulerLimits, check_admissible
from nanoserve.sched.block_pool import BlockKey
from nanoserve.sched.block_tables import BlockTables
from nanoserve.sched.budget import StepBudget
from nanoserve.sched.drafts import Drafter
from nanoserve.sched.fairness import Seats
from nanoserve.sched.plan import NewRequest, PlanRow, StepPlan, StepResult
from nanoserve.sched.policy import POLICIES, victim
from nanoserve.sched.request import Request, RequestStatus, StepOutput, TokenRow
from nanoserve.sched.stop import RepetitionWatch, Stop, find_stop, suppressed_ids

# A waiting request that does not fit lets smaller ones pass, this often; then it holds the queue until it fits.
MAX_BYPASSES = 64
# Most waiting requests that one step passes over because they do not fit, or because what they need is just being
# computed: a step's cost must not grow with the queue.
MAX_MISFITS_PER_STEP = 8
MAX_PASSED_PER_STEP = 256


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the scheduler was made."""

    prompt_tokens: int = 0  # of requests that began to run
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Owns all live requests and the KV blocks."""

    def __init__(self, limits: SchedulerLimits, eos_token_ids: Collection[int] = ()) -> None:
        self.limits = limits
        self.counters = SchedulerCounters()
        self.tables = BlockTables(limits.num_blocks, limits.block_size, caching=limits.prefix_cache)
        self.drafter = Drafter(limits.num_draft_tokens, limits.shortest_match, limits.context_cost)
        self._policy = POLICIES[limits.policy]
        self._eos_token_ids = frozenset(eos_token_ids)
        self._requests: dict[int, Request] = {}  # waiting and running
        self._waiting: list[Request] = []  # in the policy's order
        self._running: dict[int, Request] = {}  # in the order in which they began to run
        self._ended_in_flight: dict[int, Request] = {}  # finished, but the step in flight may write their blocks
        self._dropped: list[int] = []  # the executor is to forget them with the next plan
        self._in_flight: StepPlan | None = None
        self._num_steps = 0
        self._num_added = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_steps(self) -> int:
        """Steps with rows; a plan that only drops state does not count."""
        return self._num_steps

    @property
    def has_work(self) -> bool:
        """Whether a step is of use; also to tell the executor which requests to forget."""
        return bool(self._requests or self._dropped)

    def queue_position(self, request_id: int) -> int:
        """How many waiting requests come before this one; 0 also for one that runs."""
        request = self._requests[request_id]
        return self._waiting.index(request) if request.status is RequestStatus.WAITING else 0

    def without_output(self) -> list[tuple[int, int, int]]:
        """(request id, place in the queue, computed tokens) of all that wait for their first token."""
        places = [*enumerate(self._waiting), *((0, request) for request in self._running.values())]
        return [(r.request_id, place, r.num_computed_tokens) for place, r in places if not r.num_output_tokens]

    # ---- requests come and go ----------------------------------------------------------------------------

    def add(self, request: Request, now_ns: int) -> Finished | None:
        """Admits a request; RequestError when it is refused.

        A resumed request whose last output token already was its end gets its terminal record at once.
        """
        assert request.request_id not in self._requests, f"request {request.request_id} is here already"
        check_admissible(request, self.limits, len(self._requests))
        self._num_added += 1
        request.sequence = self._num_added
        room = self.limits.context_len - request.num_prompt_tokens
        request.max_output_tokens = min(request.sampling.max_tokens, room)
        self._requests[request.request_id] = request
        insort(self._waiting, request, key=self._policy)
        num_output = request.num_output_tokens
        if (wanted := request.sampling.repetition_detection) is not None:
            request.watch = RepetitionWatch(wanted, request.token_ids[request.num_prompt_tokens : -1])
        if num_output:
            # Its prompt's scores went out with the first of these tokens.
            request.prompt_scores_done = True
            stop = _stop_of(request, request.token_ids[-1:], num_output - 1, self._eos_token_ids)
            return self._end(request, stop.reason, now_ns, stop=stop) if stop else None
        return None

    def abort(
        self, request_ids: Sequence[int], cause: AbortCause, now_ns: int, num_kept: Sequence[int] = ()
    ) -> list[Finished]:
        """Ends those of the requests that live; others are passed over.

        A stop string ends a request as STOP, with the `num_kept` output tokens that the detokenizer counted.
        """
        finished = []
        for index, request_id in enumerate(request_ids):
            request = self._requests.get(request_id)
            if request is None:
                continue
            if cause is AbortCause.STOP_STRING and index < len(num_kept):
                finished.append(self._end(request, FinishReason.STOP, now_ns, num_output_tokens=num_kept[index]))
            else:
                finished.append(self._end(request, FinishReason.ABORT, now_ns))
        return finished

    def live_ids(self) -> list[int]:
        return list(self._requests)

    # ---- one step ----------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan:
        """Plans the next step: running requests first, then waiting ones while tokens, seats and blocks last."""
        assert self._in_flight is None, "the last step was not updated"
        plan = StepPlan(self._num_steps + 1, [], [], [])
        preemptions = self.counters.preemptions
        budget = StepBudget.of_step(self.limits, self._running.values(), len(self._waiting))
        budget.keep_for_probe(self._waiting)
        self._schedule_running(plan, budget)
        if self.counters.preemptions == preemptions:
            if self._waiting:
                self._schedule_waiting(plan, budget, now_ns)
            self.drafter.add_drafts(plan.rows, self._running, self.tables, self.limits.max_num_batched_tokens)
        plan.dropped, self._dropped = self._dropped, []
        self._num_steps += bool(plan.rows)
        self._in_flight = plan
        return plan

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutput:
        """Takes the executed plan's result into the requests and says what is new."""
        output = StepOutput()
        errors = {error.request_id: error.message for error in result.errors}
        offset = 0
        for (row, request), count in zip(self._land(plan), result.num_tokens, strict=True):
            new_ids = result.token_ids[offset : offset + count]
            offset += count
            if request.status is RequestStatus.FINISHED:
                continue
            if row.request_id in errors:
                failure = Failure(500, errors[row.request_id], error_type="server_error", code="row_failed")
                output.finished.append(self._end(request, FinishReason.ERROR, now_ns, failure=failure))
                continue
            assert bool(new_ids) == row.samples, f"request {row.request_id}: {count} tokens, samples={row.samples}"
            self._advance(request, row, new_ids, result, output, now_ns)
        return output

    def fail_step(self, plan: StepPlan, failure: Failure, now_ns: int) -> StepOutput:
        """The executor could not run this plan: ends all of its requests."""
        rows = [request for _, request in self._land(plan) if request.status is not RequestStatus.FINISHED]
        return StepOutput(
            finished=[self._end(request, FinishReason.ERROR, now_ns, failure=failure) for request in rows]
        )

    def _schedule_running(self, plan: StepPlan, budget: StepBudget) -> None:
        """Rows for the running requests.

        They began in this order only when tokens were left over, so at most the last of them is in the middle of
        its prompt, and a long prompt never takes the token of a stream that is under way.
        """
        for request in list(self._running.values()):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            start = request.num_computed_tokens
            num_tokens = budget.grant(len(request.token_ids) - start, start)
            if num_tokens == 0:
                continue
            while (new_block_ids := self.tables.grow(request, num_tokens)) is None:
                budget.give_back(self._preempt(victim(self._running.values(), self._policy), plan))
                if request.status is not RequestStatus.RUNNING:
                    break  # it was the last in line itself
            else:
                plan.rows.append(_plan_row(request, num_tokens, new_block_ids))
                budget.take(plan.rows[-1])

    def _schedule_waiting(self, plan: StepPlan, budget: StepBudget, now_ns: int) -> None:
        keys_in_step = self._keys_in_step(plan)
        seats = Seats(self.limits, self._running.values())
        index = misfits = 0
        while index < min(len(self._waiting), MAX_PASSED_PER_STEP):
            request = self._waiting[index]
            num_tokens = budget.for_start(request, len(self._running), self.limits)
            if num_tokens == 0:
                break
            hits = self.tables.cached_blocks(request)
            if not seats.is_free_for(request) or self.tables.is_better_later(request, hits, keys_in_step):
                index += 1
                continue
            # One free block per running request stays: without it the newcomer would soon be preempted for their
            # growth, and its prompt computed in vain.
            if not self.tables.open(request, hits, num_spare=0 if request.is_probe else len(self._running)):
                misfits += 1
                if request.num_bypasses >= MAX_BYPASSES or misfits == MAX_MISFITS_PER_STEP:
                    break
                index += 1
                continue
            for passed in self._waiting[:index]:
                passed.num_bypasses += 1
            del self._waiting[index]
            seats.take(request)
            plan.new_requests.append(self._start(request, now_ns))
            start = request.num_computed_tokens
            num_tokens = budget.grant(min(num_tokens, request.num_tokens - start), start)
            plan.rows.append(_plan_row(request, num_tokens, list(request.block_ids)))
            keys_in_step.update(self.tables.keys_in_step(request, num_tokens))
            budget.take(plan.rows[-1])

    def _keys_in_step(self, plan: StepPlan) -> set[BlockKey]:
        """Keys of the blocks that the rows planned so far fill."""
        rows = [(self._running[row.request_id], row.num_tokens) for row in plan.rows]
        return {key for request, num_tokens in rows for key in self.tables.keys_in_step(request, num_tokens)}

    def _start(self, request: Request, now_ns: int) -> NewRequest:
        request.status = RequestStatus.RUNNING
        request.in_executor = True
        self._running[request.request_id] = request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            request.scheduled_ns = now_ns
            self.counters.prompt_tokens += request.num_prompt_tokens
            self.counters.prefix_query_tokens += request.num_tokens
            self.counters.prefix_hit_tokens += request.num_computed_tokens
        sampling = request.sampling
        if sampling.prompt_logprobs is not None and request.prompt_scores_done:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return NewRequest(
            request.request_id,
            list(request.token_ids),
            request.num_prompt_tokens,
            sampling,
            suppressed_ids(sampling, self._eos_token_ids),
        )

    def _preempt(self, request: Request, plan: StepPlan) -> list[PlanRow]:
        """Sends a running request back to wait. Returns its row, if it was planned: it is planned no more."""
        del self._running[request.request_id]
        self.tables.close(request)
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        request.in_flight = False
        if not request.prompt_scores_done:
            request.prompt_scores.clear()
        self._forget_in_executor(request)
        insort(self._waiting, request, key=self._policy)
        self.counters.preemptions += 1
        dropped = [row for row in plan.rows if row.request_id == request.request_id]
        plan.rows = [row for row in plan.rows if row.request_id != request.request_id]
        return dropped

    def _land(self, plan: StepPlan) -> list[tuple[PlanRow, Request]]:
        """The step has ended: its rows with their requests; blocks of those that ended meanwhile are free now."""
        assert plan is self._in_flight, "this plan is not in flight"
        self._in_flight = None
        landed = []
        for row in plan.rows:
            request = self._running.get(row.request_id) or self._ended_in_flight.pop(row.request_id)
            request.in_flight = False
            if request.status is RequestStatus.FINISHED:
                self.tables.close(request)
            landed.append((row, request))
        return landed

    def _advance(
        self, request: Request, row: PlanRow, new_ids: list[int], result: StepResult, output: StepOutput, now_ns: int
    ) -> None:
        drafts = row.draft_token_ids
        request.num_computed_tokens = row.start + row.num_tokens - len(drafts)
        if request.wants_prompt_scores:
            output.prompt_scores += request.take_prompt_scores(result.prompt_scores.get(row.request_id, []))
        sampling, stop = request.sampling, None
        if new_ids:
            first_index = len(request.token_ids) - request.num_prompt_tokens
            stop = _stop_of(request, new_ids, first_index, self._eos_token_ids)
            if stop is not None:
                new_ids = new_ids[: stop.num_kept]
            request.token_ids += new_ids
            if drafts:
                request.num_computed_tokens += self.drafter.num_accepted(request, drafts, new_ids)
            if not request.first_token_ns:
                request.first_token_ns = now_ns
            self.counters.generation_tokens += len(new_ids)
            scores = result.scores[row.request_id][: len(new_ids)] if sampling.logprobs is not None else None
            output.rows.append(TokenRow(row.request_id, first_index, new_ids, scores))
        elif request.num_computed_tokens == request.num_tokens:
            stop = Stop(0, FinishReason.LENGTH)  # max_tokens=0: the prompt was all
        self.tables.register_full_blocks(request)
        if stop is not None:
            output.finished.append(self._end(request, stop.reason, now_ns, stop=stop))

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        now_ns: int,
        *,
        stop: Stop | None = None,
        failure: Failure | None = None,
        num_output_tokens: int | None = None,
    ) -> Finished:
        """The only way out of the scheduler: takes the request out of every map and makes its terminal record."""
        del self._requests[request.request_id]
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            del self._running[request.request_id]
        request.status = RequestStatus.FINISHED
        self._forget_in_executor(request)
        if request.in_flight:
            self._ended_in_flight[request.request_id] = request
        else:
            self.tables.close(request, discard=failure is not None)
        return Finished(
            request.request_id,
            reason,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens if num_output_tokens is None else num_output_tokens,
            num_cached_tokens=request.num_cached_tokens or 0,
            stop_token_id=stop.stop_token_id if stop else None,
            is_eos=stop.is_eos if stop else False,
            failure=failure,
            arrival_ns=request.arrival_ns,
            scheduled_ns=request.scheduled_ns,
            first_token_ns=request.first_token_ns,
            finished_ns=now_ns,
            num_preemptions=request.num_preemptions,
        )

    def _forget_in_executor(self, request: Request) -> None:
        if request.in_executor:
            request.in_executor = False
            self._dropped.append(request.request_id)

    # ---- invariants --------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """AssertionError when books and blocks disagree. Costs O(blocks): for tests."""
        holders = [*self._running.values(), *self._ended_in_flight.values()]
        self.tables.pool.check_invariants([request.block_ids for request in holders])
        assert self._requests.keys() == self._running.keys() | {request.request_id for request in self._waiting}
        assert len(self._requests) == len(self._running) + len(self._waiting), "a request is in two places"
        assert self._waiting == sorted(self._waiting, key=self._policy), "the queue is out of order"
        assert all(not request.block_ids for request in self._waiting), "a waiting request holds blocks"
        assert self._in_flight is not None or not self._ended_in_flight, "blocks wait for a step that is over"
        for request in self._running.values():
            room = len(request.block_ids) * self.limits.block_size
            assert request.num_computed_tokens <= min(request.num_tokens, room), f"request {request.request_id}"
        if not self.has_work:
            self.check_idle()

    def check_idle(self) -> None:
        """AssertionError when a scheduler without work still holds something. Costs O(1): for an idle engine."""
        assert not (self._waiting or self._running or self._ended_in_flight), "a request was forgotten"
        assert self.tables.pool.num_used == 0, f"{self.tables.pool.num_used} blocks are held by nobody"


def _plan_row(request: Request, num_tokens: int, new_block_ids: list[int]) -> PlanRow:
    request.in_flight = True
    start = request.num_computed_tokens
    samples = start + num_tokens == len(request.token_ids) and request.max_output_tokens > 0
    return PlanRow(request.request_id, start, num_tokens, new_block_ids, samples)


def _stop_of(request: Request, new_ids: Sequence[int], first_index: int, eos_token_ids: Collection[int]) -> Stop | None:
    limit = request.max_output_tokens
    return find_stop(new_ids, first_index, limit, request.sampling, eos_token_ids, request.watch)
