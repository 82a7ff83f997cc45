"""What handlers of one api process share, wired once by `process`.

Owner process: api. Each part owns its own state; this only holds them together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from nanoserve.api.access import Access
from nanoserve.api.admission import Admission, BodyBudget
from nanoserve.api.engine_client import EngineClient
from nanoserve.api.failure_log import FailureLog
from nanoserve.api.lifecycle import Lifecycle
from nanoserve.api.metrics import Metrics
from nanoserve.api.pacing import Pacer
from nanoserve.api.peers import Peers
from nanoserve.api.request_log import RequestLog
from nanoserve.api.resume import Resumes
from nanoserve.api.stream import PumpQueue
from nanoserve.api.validation import Checker
from nanoserve.config import ServerConfig


@dataclass(slots=True, kw_only=True)
class ApiContext:
    config: ServerConfig
    client: EngineClient
    lifecycle: Lifecycle
    admission: Admission
    metrics: Metrics
    pacer: Pacer
    access: Access
    peers: Peers
    bodies: BodyBudget
    request_log: RequestLog
    seeds: random.Random
    clock_s: Callable[[], float] = field(default=time.monotonic)
    failures: FailureLog = field(default_factory=FailureLog)
    pumps: PumpQueue = field(default_factory=PumpQueue)
    resumes: Resumes | None = None  # with --resume-grace
    checker: Checker | None = None  # set when the model is loaded
    log_dir: Path = field(default_factory=Path)  # of all processes; set by `process`
    memory: Callable[[str], dict[str, int]] = field(default=lambda name: {})  # ledger of a process, by its name

    @property
    def root_path(self) -> str:
        """What a proxy may put before every path: empty, or with a slash in front and none at the end."""
        prefix = self.config.api.root_path.strip("/")
        return "/" + prefix if prefix else ""

    def own_path(self, path: str) -> str:
        """The path as our routes and rules spell it."""
        root = self.root_path
        return path[len(root) :] if root and path.startswith(root + "/") else path

    def tick(self, now_s: float) -> None:
        """Everything that happens because time has passed."""
        self.pacer.tick(now_s)
        if self.resumes is not None:
            self.resumes.tick(now_s)

    def close(self) -> None:
        """Ends what would outlive the connections."""
        if self.resumes is not None:
            self.resumes.close()
        self.peers.close()
        self.lifecycle.close()

    def retry_after_s(self) -> float:
        """When a refused client should come back: half of the queue, here or in the engine, at the measured rate."""
        now_s = self.clock_s()
        waiting = self.metrics.engine_stats.num_waiting // 2
        return max(self.admission.retry_after_s(now_s), self.admission.seconds_for(waiting, now_s))

    def require_checker(self) -> Checker:
        """Unavailable while the model loads, drains or has failed, and when every place is taken."""
        self.lifecycle.require_ready()
        self.admission.refuse_if_full(self.clock_s())
        assert self.checker is not None  # set before readiness
        return self.checker


def build_context(config: ServerConfig, client: EngineClient, metrics: Metrics, peers: Peers) -> ApiContext:
    """The parts of one api process but for its channels."""
    seed = config.model.seed
    context = ApiContext(
        config=config,
        client=client,
        lifecycle=Lifecycle(),
        admission=Admission(
            max_running=config.scheduler.max_num_seqs,
            max_queued=config.scheduler.max_num_queued,
            overload_status=int(config.api.overload_status),
        ),
        metrics=metrics,
        pacer=Pacer(),
        access=Access(config.api),
        bodies=BodyBudget(config.api.max_bodies_bytes),
        request_log=RequestLog(is_on=config.obs.log_requests, level=int(config.obs.log_requests_level)),
        peers=peers,
        seeds=random.Random(seed) if seed else random.SystemRandom(),
    )
    if config.api.resume_grace:
        resumes = context.resumes = Resumes(
            grace_s=config.api.resume_grace, max_bytes=config.api.stream_buffer_bytes, clock_s=context.clock_s
        )
        metrics.watch_gauge(
            "resumable_streams_forgotten",
            "ended streams that made room for others before their grace time was over",
            lambda: resumes.num_forgotten,
        )
    metrics.watch_client(client.counters)
    metrics.watch_gauge("api_live_requests", "requests this api process has in the ring", lambda: client.num_live)
    return context


CONTEXT = web.AppKey("context", ApiContext)
