"""What the engine counts, as gauges and totals on the wire and as a status line in its log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from nanoserve.ipc.messages import EngineStats, StartProfile
from nanoserve.sched.scheduler import Scheduler

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineCounters:
    """Totals of one incarnation, beside those that the scheduler keeps."""

    dropped_messages: int = 0  # for unknown ids, or repeated
    num_ended: int = 0  # requests that were admitted
    num_flushes: int = 0
    flushed_blocks: int = 0
    stop_overrun_rows: int = 0  # computed for requests that a stop string had ended meanwhile
    step_seconds: float = 0.0
    schedule_seconds: float = 0.0
    build_seconds: float = 0.0
    forward_seconds: float = 0.0
    sample_seconds: float = 0.0
    send_seconds: float = 0.0
    profile: int = 0
    profile_steps_left: int = 0
    profile_file: str = ""

    def begin_profile(self, message: StartProfile) -> None:
        """One at a time: while one runs, another is not begun."""
        if not self.profile_steps_left:
            self.profile, self.profile_steps_left = message.number, message.num_steps
            self.profile_file = message.file

    def end_profile(self) -> None:
        self.profile_steps_left = 0

    def snapshot(self, scheduler: Scheduler, *, num_retained: int, num_undecodable: int, paused: bool) -> EngineStats:
        totals = scheduler.counters
        pool = scheduler.tables.pool
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            blocks_used=pool.num_used,
            blocks_total=pool.num_blocks,
            steps=scheduler.num_steps,
            prompt_tokens=totals.prompt_tokens,
            generation_tokens=totals.generation_tokens,
            prefix_query_tokens=totals.prefix_query_tokens,
            prefix_hit_tokens=totals.prefix_hit_tokens,
            preemptions=totals.preemptions,
            dropped_messages=self.dropped_messages + num_undecodable,
            step_seconds=self.step_seconds,
            schedule_seconds=self.schedule_seconds,
            build_seconds=self.build_seconds,
            forward_seconds=self.forward_seconds,
            sample_seconds=self.sample_seconds,
            send_seconds=self.send_seconds,
            num_retained=num_retained,
            draft_tokens=scheduler.drafter.num_drafts,
            accepted_draft_tokens=scheduler.drafter.num_right,
            stop_overrun_rows=self.stop_overrun_rows,
            num_ended=self.num_ended,
            num_flushes=self.num_flushes,
            flushed_blocks=self.flushed_blocks,
            profile=self.profile,
            profile_steps_left=self.profile_steps_left,
            paused=paused,
        )


class StatusLine:
    """Logs a line each `interval_s` seconds in which something was computed; 0 is never."""

    def __init__(self, interval_s: float, now_ns: int) -> None:
        self._interval_ns = int(interval_s * 1e9)
        self._last_ns = now_ns
        self._last = EngineStats()

    def update(self, stats: EngineStats, now_ns: int) -> None:
        if not self._interval_ns or now_ns - self._last_ns < self._interval_ns:
            return
        last, seconds = self._last, (now_ns - self._last_ns) / 1e9
        self._last, self._last_ns = stats, now_ns
        if stats.steps == last.steps:
            return
        query = stats.prefix_query_tokens - last.prefix_query_tokens
        hit = stats.prefix_hit_tokens - last.prefix_hit_tokens
        _log.info(
            "prompt %.1f tok/s, output %.1f tok/s, running %d, waiting %d, KV %.1f %%, prefix hits %.1f %%, "
            "%.1f ms a step, preempted %d",
            (stats.prompt_tokens - last.prompt_tokens) / seconds,
            (stats.generation_tokens - last.generation_tokens) / seconds,
            stats.num_running,
            stats.num_waiting,
            100 * stats.blocks_used / max(stats.blocks_total, 1),
            100 * hit / max(query, 1),
            1e3 * (stats.step_seconds - last.step_seconds) / (stats.steps - last.steps),
            stats.preemptions - last.preemptions,
        )
