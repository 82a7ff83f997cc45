"""What /metrics shows: this api process's own counts, and the last stats of engine and detokenizer.

Owner process: api. Observing costs well under a microsecond (a bisect and two additions), because it happens per token;
prometheus-client renders the text at scrape time. Labels come from fixed sets.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nanoserve.api.engine_client import ClientCounters, LatencySink
from nanoserve.ipc.messages import DetokStats, EngineStats, Finished, FinishReason, MetricSamples, TextBatch

PREFIX = "nanoserve_"
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_ITL = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histogram:
    """Fixed buckets; `observe` with a weight counts that many equal observations."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, weight: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += weight
        self._sum += value * weight

    def family(self, name: str, words: str) -> HistogramMetricFamily:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), total))
        family = HistogramMetricFamily(PREFIX + name, words)
        family.add_metric([], buckets, self._sum)
        return family


class Monotonic:
    """Counters of a process that may restart from zero: what earlier lives counted is added."""

    def __init__(self, fields: tuple[str, ...]) -> None:
        self._base = dict.fromkeys(fields, 0.0)
        self._last: msgspec.Struct | None = None
        self._life = 0

    def update(self, life: int, stats: msgspec.Struct) -> None:
        """`life` is the incarnation; stats of an earlier one than the last seen are ignored."""
        if life < self._life:
            return
        if life > self._life:
            for name in self._base:
                self._base[name] = self.total(name)
            self._life = life
        self._last = stats  # read when it is asked for: this happens with every batch

    def total(self, name: str) -> float:
        return self._base[name] + (getattr(self._last, name) if self._last is not None else 0.0)


# name of the metric, field of the stats, help
_ENGINE_GAUGES = (
    ("num_requests_running", "num_running", "requests in the running batch"),
    ("num_requests_waiting", "num_waiting", "requests that wait for the engine"),
    ("kv_blocks_used", "blocks_used", "KV blocks that requests hold"),
    ("kv_blocks_total", "blocks_total", "KV blocks of the pool"),
    ("num_requests_retained", "num_retained", "ended requests that are not released yet"),
    ("paused", "paused", "1 after /pause_generation: requests are taken and wait"),
)
_ENGINE_COUNTERS = (
    ("engine_steps", "steps", "steps of the engine"),
    ("prompt_tokens", "prompt_tokens", "prompt tokens processed"),
    ("generation_tokens", "generation_tokens", "tokens generated"),
    ("prefix_cache_queries", "prefix_query_tokens", "prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "prefix_hit_tokens", "prompt tokens found in the prefix cache"),
    ("spec_decode_num_draft_tokens", "draft_tokens", "tokens computed as drafts of speculation"),
    ("spec_decode_num_accepted_tokens", "accepted_draft_tokens", "drafts that were right"),
    ("num_preemptions", "preemptions", "requests preempted"),
    ("engine_dropped_messages", "dropped_messages", "messages the engine could not use"),
    ("engine_step_seconds", "step_seconds", "time spent in steps"),
    ("engine_schedule_seconds", "schedule_seconds", "time spent scheduling"),
    ("engine_build_seconds", "build_seconds", "time spent building the arrays of steps"),
    ("engine_forward_seconds", "forward_seconds", "time spent in the forward pass"),
    ("engine_sample_seconds", "sample_seconds", "time spent sampling"),
    ("engine_send_seconds", "send_seconds", "time spent sending to the detokenizer"),
)
_ENGINE_UNSHOWN = ("stop_overrun_rows", "num_ended", "num_flushes", "flushed_blocks")  # counted on over restarts too
_DETOK_GAUGES = (
    ("detok_states", "num_states", "streams the detokenizer holds"),
    ("detok_lag_steps", "lag_steps", "batches that waited when the detokenizer last drained its inbox"),
    ("detok_lag_seconds", "lag_seconds", "age of the oldest batch of the detokenizer's last drain"),
    ("detok_batch_size", "rows", "requests in the detokenizer's last drain"),
    ("detok_held_streams", "held_streams", "of those, the ones that hold text back for a stop string"),
)
_DETOK_COUNTERS = (
    ("detok_batches", "batches", "drained batches"),
    ("detok_tokens", "tokens", "tokens decoded"),
    ("detok_decode_seconds", "decode_seconds", "time spent decoding"),
    ("detok_evictions", "evictions", "states evicted"),
    ("detok_resyncs", "resyncs", "states rebuilt from the engine's ids"),
    ("detok_forced_cuts", "forced_flushes", "windows of undecodable bytes that were cut at their cap"),
    ("detok_late_rows", "late_rows", "rows for unknown or ended requests"),
    ("detok_row_errors", "row_errors", "rows that could not be decoded"),
    ("detok_dropped_messages", "dropped_messages", "messages the detokenizer could not use"),
)
_CLIENT_COUNTERS = (
    ("requests", "submitted", "requests sent to the engine"),
    ("requests_aborted", "aborted", "requests ended before their time"),
    ("api_late_rows", "late_rows", "rows for requests that are gone"),
    ("api_repeated_rows", "repeated_rows", "rows that were here already"),
    ("api_stream_gaps", "gaps", "streams that lost a part, which was asked for again"),
    ("requests_resubmitted", "resubmitted", "requests handed to a new engine"),
    ("requests_asked_again", "asked", "requests that were silent for long and asked for again"),
)
Table = tuple[tuple[str, str, str], ...]


class _Families(Collector):
    """A scrape's families, as the renderer wants them."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _labelled(by_process: Mapping[str, Sequence[MetricSamples]]) -> Iterator[Metric]:
    """The families of all processes, each sample with its process's name. A sum here would jump back at a restart."""
    families: dict[str, Metric] = {}
    for process, own in by_process.items():
        for shown in own:
            family = families.setdefault(shown.name, Metric(shown.name, shown.words, shown.kind))
            for name, labels, value in shown.samples:
                family.add_sample(name, {**labels, "api": process}, value)
    yield from families.values()


class Metrics(LatencySink):
    """The counts of this process, and the last stats of the ring."""

    def __init__(self) -> None:
        self.streams_open = 0
        self.slow_readers_cut = 0
        self.responses: Counter[tuple[str, str]] = Counter()  # (route, status class)
        self.ended: Counter[str] = Counter()  # finish reasons
        self.engine_stats = EngineStats()
        self.detok_stats = DetokStats()
        self._engine_counts = Monotonic((*(field for _, field, _ in _ENGINE_COUNTERS), *_ENGINE_UNSHOWN))
        self._detok_counts = Monotonic((*(field for _, field, _ in _DETOK_COUNTERS), "stop_overrun_tokens"))
        self._latency = {
            "time_to_first_token_seconds": Histogram(_SECONDS),
            "inter_token_latency_seconds": Histogram(_ITL),
            "e2e_request_latency_seconds": Histogram(_SECONDS),
            "request_queue_time_seconds": Histogram(_SECONDS),
            "request_prefill_time_seconds": Histogram(_SECONDS),
            "request_decode_time_seconds": Histogram(_SECONDS),
            "request_prompt_tokens": Histogram(_TOKENS),
            "request_generation_tokens": Histogram(_TOKENS),
        }
        self._ttft = self._latency["time_to_first_token_seconds"].observe
        self._itl = self._latency["inter_token_latency_seconds"].observe
        self._client: ClientCounters | None = None
        self._stats_waiter: asyncio.Future[None] | None = None  # for the next stats of the engine
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}

    def watch_client(self, counters: ClientCounters) -> None:
        self._client = counters

    def watch_gauge(self, name: str, words: str, read: Callable[[], float]) -> None:
        """A gauge whose owner is asked at scrape time."""
        self._gauges[name] = (words, read)

    # ---- told by the engine client -----------------------------------------------------------------------

    def first_token(self, seconds: float) -> None:
        self._ttft(seconds)

    def inter_token(self, seconds: float, num_tokens: int) -> None:
        self._itl(seconds, num_tokens)

    def finished(self, record: Finished, seconds: float) -> None:
        observe = self._latency
        observe["e2e_request_latency_seconds"].observe(seconds)
        observe["request_prompt_tokens"].observe(record.num_prompt_tokens)
        observe["request_generation_tokens"].observe(record.num_output_tokens)
        if record.arrival_ns and record.scheduled_ns:
            observe["request_queue_time_seconds"].observe((record.scheduled_ns - record.arrival_ns) * 1e-9)
        if record.scheduled_ns and record.first_token_ns:
            observe["request_prefill_time_seconds"].observe((record.first_token_ns - record.scheduled_ns) * 1e-9)
        if record.first_token_ns and record.finished_ns:
            observe["request_decode_time_seconds"].observe((record.finished_ns - record.first_token_ns) * 1e-9)
        self.ended[FinishReason(record.reason).name.lower()] += 1

    def note_batch(self, batch: TextBatch) -> None:
        """Keeps the stats that ride on a batch."""
        if batch.engine_stats is not None:
            self.engine_stats = batch.engine_stats
            self._engine_counts.update(batch.engine_incarnation, batch.engine_stats)
            if self._stats_waiter is not None and not self._stats_waiter.done():
                self._stats_waiter.set_result(None)
        if batch.detok_stats is not None:
            self.detok_stats = batch.detok_stats
            self._detok_counts.update(batch.incarnation, batch.detok_stats)

    @property
    def num_ended(self) -> float:
        """Requests of all api processes that the engine has ended."""
        return self._engine_counts.total("num_ended")

    async def flushed(self, flush: Callable[[], object]) -> int:
        """Calls `flush` and waits for the engine's word of it; returns how many cached blocks it forgot."""
        count = self._engine_counts.total
        num_flushes, num_blocks = count("num_flushes"), count("flushed_blocks")
        flush()
        while count("num_flushes") <= num_flushes:
            await self._next_stats()
        return int(count("flushed_blocks") - num_blocks)

    async def profile_begins(self, number: int, begin: Callable[[], object]) -> bool:
        """Calls `begin` and waits for the engine's word of it; False when another profile runs."""
        if self.engine_stats.profile_steps_left:
            return False
        begin()
        while self.engine_stats.profile != number:
            await self._next_stats()
            if self.engine_stats.profile != number and self.engine_stats.profile_steps_left:
                return False
        return True

    async def profile_ends(self, end: Callable[[], object]) -> int:
        """Calls `end` and waits for the engine's word of it; returns which profile has ended, 0 where none ran."""
        if not self.engine_stats.profile_steps_left:
            return 0
        number = self.engine_stats.profile
        end()
        while self.engine_stats.profile == number and self.engine_stats.profile_steps_left:
            await self._next_stats()
        return number

    async def _next_stats(self) -> None:
        if self._stats_waiter is None or self._stats_waiter.done():
            self._stats_waiter = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._stats_waiter)

    # ---- asked by a scrape -------------------------------------------------------------------------------

    def render(self, by_process: Mapping[str, Sequence[MetricSamples]] | None = None) -> bytes:
        """The exposition; with several api processes everybody's own samples by name, told apart by the label `api`."""
        families = self._own() if by_process is None else _labelled(by_process)
        return generate_latest(_Families([*self._of_ring(), *families]))

    def own_samples(self) -> list[MetricSamples]:
        """What this process counts itself, to be rendered by another one."""
        return [
            MetricSamples(family.name, family.documentation, family.type, [sample[:3] for sample in family.samples])
            for family in self._own()
        ]

    def _of_ring(self) -> Iterator[Metric]:
        """Of engine and detokenizer: every api process knows the same."""
        yield from self._stats(_ENGINE_GAUGES, _ENGINE_COUNTERS, self.engine_stats, self._engine_counts)
        yield from self._stats(_DETOK_GAUGES, _DETOK_COUNTERS, self.detok_stats, self._detok_counts)
        yield CounterMetricFamily(
            PREFIX + "stop_overrun_tokens",
            "tokens computed after a stop string, here or on the way to us; neither shown nor billed",
            value=self._engine_counts.total("stop_overrun_rows") + self._detok_counts.total("stop_overrun_tokens"),
        )

    def _own(self) -> Iterator[Metric]:
        if self._client is not None:
            for name, field, words in _CLIENT_COUNTERS:
                yield CounterMetricFamily(PREFIX + name, words, value=getattr(self._client, field))
        for name, (words, read) in self._gauges.items():
            yield GaugeMetricFamily(PREFIX + name, words, value=read())
        yield GaugeMetricFamily(PREFIX + "http_streams_open", "open event streams", value=self.streams_open)
        yield CounterMetricFamily(
            PREFIX + "slow_readers_cut", "streams ended because the client did not read", value=self.slow_readers_cut
        )
        responses = CounterMetricFamily(
            PREFIX + "http_responses", "HTTP answers by route and status class", labels=["route", "status"]
        )
        for (route, status), count in sorted(self.responses.items()):
            responses.add_metric([route, status], count)
        yield responses
        ended = CounterMetricFamily(PREFIX + "request_success", "ended requests by reason", labels=["finished_reason"])
        for reason, count in sorted(self.ended.items()):
            ended.add_metric([reason], count)
        yield ended
        for name, histogram in self._latency.items():
            yield histogram.family(name, name.replace("_", " "))

    @staticmethod
    def _stats(gauges: Table, counters: Table, stats: msgspec.Struct, counts: Monotonic) -> Iterator[Metric]:
        for name, field, words in gauges:
            yield GaugeMetricFamily(PREFIX + name, words, value=getattr(stats, field))
        for name, field, words in counters:
            yield CounterMetricFamily(PREFIX + name, words, value=counts.total(field))
