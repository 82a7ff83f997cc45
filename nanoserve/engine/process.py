"""The engine process: loads the model, then turns messages from api and detok into one `TokenBatch` a step.

Started by the supervisor through `nanoserve.child`. The loop never waits for a peer: sending queues in memory, and
the only blocking call is the receive of an engine that has nothing to compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from nanoserve.config import SchedulerConfig, ServerConfig
from nanoserve.engine.core import EngineCore
from nanoserve.engine.profile import StepProfiler
from nanoserve.engine.slow_steps import SlowStepLog
from nanoserve.engine.stats import StatusLine
from nanoserve.engine.suspects import RecordingExecutor, StepRecord, SuspectInbox, Suspects
from nanoserve.hub.model_files import read_model_files
from nanoserve.ipc.channels import Inbox, Outbox
from nanoserve.ipc.endpoints import Endpoints
from nanoserve.ipc.link import ProcessLink, Watchdog
from nanoserve.ipc.messages import EngineFacts, EngineInbox, TokenBatch
from nanoserve.sched.admission import SchedulerLimits
from nanoserve.sched.budget import prompt_context_cost
from nanoserve.sched.drafts import context_cost
from nanoserve.sched.plan import Executor, StepPlan, StepResult
from nanoserve.sched.scheduler import Scheduler

HEARTBEAT_NS = 1_000_000_000
# How long a step may take before it counts as late: slow CPUs compute some tens of prompt tokens a second, and the
# first step with a new shape may compile or fault memory in.
STEP_LIMIT_S = 10.0
TOKEN_LIMIT_S = 0.05
CPU_DRAFT_TOKENS = 4
CPU_PROMPT_TOKENS_PER_STREAM = 2
KNOWN_STEPS = 16
SLOWER = 4.0  # times the slowest of those that are known


class WatchedExecutor:
    """An executor whose steps are declared to the watchdog, so that a stall names its plan.

    Steps of one token a row take about the same time each: once some are known, a stuck one is noticed soon. All others
    are given the time that a slow machine would need.
    """

    def __init__(self, executor: Executor, watchdog: Watchdog, clock: Callable[[], float] = time.monotonic) -> None:
        self._executor = executor
        self._watchdog = watchdog
        self._clock = clock
        self._num_short = 0
        self._slowest_short_s = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        num_tokens = sum(row.num_tokens for row in plan.rows)
        what = f"step {plan.step}: {len(plan.rows)} rows, {num_tokens} tokens"
        is_short = num_tokens == len(plan.rows)
        limit_s = STEP_LIMIT_S + TOKEN_LIMIT_S * num_tokens
        if is_short and self._num_short >= KNOWN_STEPS:
            limit_s = min(limit_s, SLOWER * self._slowest_short_s)
        begin_s = self._clock()
        with self._watchdog.busy(what, limit_s):
            result = self._executor.execute(plan)
        if is_short:
            self._num_short += 1
            self._slowest_short_s = max(self._slowest_short_s, self._clock() - begin_s)
        return result

    def close(self) -> None:
        self._executor.close()


def run(config: ServerConfig, model_dir: Path, endpoints: Endpoints, link: ProcessLink) -> None:
    """Runs until the link asks for the end. The inbox is bound before the model is loaded: what comes early waits."""
    context: zmq.Context[Any] = zmq.Context()
    inbox: Inbox[EngineInbox] = Inbox(context, endpoints.engine(link.index), EngineInbox, wake_fd=link.stop_fd)
    outbox = Outbox(context, endpoints.detok())
    try:
        executor, facts, eos_token_ids = load_executor(config, model_dir, link.stage)
        executor = _plant_faults(config, executor, link)
        scheduler = Scheduler(scheduler_limits(config.scheduler, facts), eos_token_ids)
        record = StepRecord(endpoints.step_record(link.index))
        suspects = Suspects(record, endpoints.strikes(link.index))
        guarded = SuspectInbox(inbox, suspects)
        watched = WatchedExecutor(SlowStepLog(executor, config.obs.slow_step), link.watchdog)
        profiler = StepProfiler(RecordingExecutor(watched, suspects))
        core = EngineCore(
            scheduler,
            profiler,
            guarded,
            engine_index=link.index,
            incarnation=link.incarnation,
            clock=time.monotonic_ns,
            refuse=suspects.refusal,
        )
        link.ready(facts)
        serve(core, guarded, outbox, link, StatusLine(config.obs.stats_interval, time.monotonic_ns()), profiler)
    finally:
        inbox.close()
        outbox.close()
        context.term()


def _plant_faults(config: ServerConfig, executor: Executor, link: ProcessLink) -> Executor:
    """For tests: steps that fail as `--fault` says."""
    if not config.obs.fault:
        return executor
    from nanoserve.engine.faults import FaultyExecutor
    from nanoserve.obs.faults import faults_for

    return FaultyExecutor(executor, faults_for(config.obs.fault, link.name, link.incarnation))


def serve(
    core: EngineCore,
    inbox: SuspectInbox,
    outbox: Outbox,
    link: ProcessLink,
    status: StatusLine,
    profiler: StepProfiler,
) -> None:
    """The loop: receive, tell what is new, compute a step, tell what it gave."""
    beat_ns = time.monotonic_ns()

    def send(batch: TokenBatch | None) -> None:
        if batch is not None:
            begin_ns = time.monotonic_ns()
            outbox.send(batch)
            core.counters.send_seconds += (time.monotonic_ns() - begin_ns) / 1e9

    while not link.stop_requested:
        link.watchdog.feed()
        if not core.has_work:
            with link.watchdog.idle():
                inbox.wait(max(0, beat_ns + HEARTBEAT_NS - time.monotonic_ns()) // 1_000_000 + 1)
        core.receive()
        profiler.follow(core.counters)
        send(core.take_news())  # admissions are told before the step that may take long
        if core.has_work:
            if core.counters.profile_steps_left:
                profiler.step(core, send)
            else:
                send(core.step())
        now_ns = time.monotonic_ns()
        if now_ns - beat_ns >= HEARTBEAT_NS:
            beat_ns = now_ns
            status.update(core.stats(), now_ns)
            if not core.has_work:
                send(core.heartbeat())
    # No request is told of an end: a server that stops has none left, and where this process alone was told to stop,
    # api gives them to its next life.
    core.close()


def preload(config: ServerConfig) -> None:
    """Imports all that a start needs, and nothing else: for a process that waits to take another's place."""
    if config.is_sim:
        import nanoserve.runner.sim
    else:
        import nanoserve.runner.executor
        import nanoserve.runner.native.open  # noqa: F401


def load_executor(
    config: ServerConfig, model_dir: Path, progress: Callable[[str, float], None]
) -> tuple[Executor, EngineFacts, tuple[int, ...]]:
    """The executor, what it found out about itself, and the model's EOS ids. StartupError when it cannot be made.

    The runner is imported here only: `sim` needs no torch.
    """
    files = read_model_files(model_dir, need_weights=not config.is_sim and config.model.load_format != "dummy")
    if config.is_sim:
        from nanoserve.runner.sim import create_sim_executor

        return *create_sim_executor(config, files.vocab_size), files.eos_token_ids
    from nanoserve.runner.executor import create_executor

    return *create_executor(config, model_dir, progress), files.eos_token_ids


def scheduler_limits(config: SchedulerConfig, facts: EngineFacts) -> SchedulerLimits:
    drafts = config.speculative_num_tokens
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_queued=config.max_num_queued,
        max_model_len=facts.max_model_len,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
        vocab_size=facts.vocab_size,
        policy=config.scheduling_policy,
        prefix_cache=config.prefix_cache,
        prompt_tokens_per_stream=config.prompt_tokens_per_stream or _prompt_tokens_per_stream(facts),
        prompt_context_cost=prompt_context_cost(facts.context_bytes, facts.num_parameters),
        num_draft_tokens=_num_draft_tokens(facts) if drafts < 0 else drafts,
        shortest_match=config.speculative_ngram_min,
        context_cost=context_cost(facts.context_bytes, facts.num_parameters),
    )


def _prompt_tokens_per_stream(facts: EngineFacts) -> int:
    """On a CPU a token more takes a step longer from the first on; a GPU computes hundreds for little more than one."""
    return CPU_PROMPT_TOKENS_PER_STREAM if facts.device == "cpu" else 0


def _num_draft_tokens(facts: EngineFacts) -> int:
    """Where a row's logits depend on its company, drafts could change an answer: nobody gets them unasked."""
    return CPU_DRAFT_TOKENS if facts.device == "cpu" and facts.batch_invariant else 0
