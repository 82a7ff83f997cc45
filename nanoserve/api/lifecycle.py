"""What this api process may do now: loading, ready, draining, failed.

Owner process: api. Owns the last ServerStatus and the served model. `process` updates it, handlers ask it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanoserve.api.encoding import Encoder
from nanoserve.api.errors import Unavailable
from nanoserve.api.model import ServedModel
from nanoserve.ipc.messages import ServerStatus

_HEALTHY = frozenset({"starting", "ready"})
_LOADING_RETRY_S = 2.0


class Lifecycle:
    """One object per process; nothing here waits or does I/O."""

    def __init__(self) -> None:
        self.status = ServerStatus(stage="starting")
        self.model: ServedModel | None = None
        self.encoder: Encoder | None = None
        self.ring_turned = False
        self.stopping = False  # this process was asked to stop, whatever the supervisor says
        # Asked at probes; set by `process`: who tells us of the other processes cannot tell of itself.
        self.is_supervisor_stopped: Callable[[], bool] = lambda: False

    @property
    def draining(self) -> bool:
        return self.stopping or self.status.draining

    def loaded(self, model: ServedModel) -> None:
        """The model's files are read; requests still wait for `ring_turned`."""
        self.model = model
        self.encoder = Encoder(model.tokenizer)

    def require_model(self) -> ServedModel:
        """The model, for paths that need no engine; Unavailable while it loads."""
        if self.model is None:
            raise Unavailable(f"The server is not ready: {self.stage}.", retry_after_s=_LOADING_RETRY_S, code="loading")
        return self.model

    def require_ready(self) -> ServedModel:
        """The model, if a new request may start now; Unavailable otherwise."""
        if self.status.failed:
            raise Unavailable("The server is shutting down after a failure.", retry_after_s=10.0, code="failed")
        if self.draining:
            raise Unavailable("The server is shutting down.", retry_after_s=5.0, code="draining")
        model = self.require_model()
        if not self.ring_turned:
            raise Unavailable(f"The server is not ready: {self.stage}.", retry_after_s=_LOADING_RETRY_S, code="loading")
        return model

    def require_encoder(self) -> Encoder:
        self.require_model()
        assert self.encoder is not None  # set together with the model
        return self.encoder

    @property
    def stage(self) -> str:
        if self.status.failed:
            return "failed"
        if self.draining:
            return "draining"
        if self.ring_turned:
            return "ready"
        return self.status.stage if self.status.stage != "ready" else "warming up"

    @property
    def is_ready(self) -> bool:
        return self.ring_turned and not self.draining and not self.status.failed and not self.sick_processes()

    def sick_processes(self) -> list[str]:
        """Names of processes that are neither starting nor ready, as the supervisor sees them, and of itself."""
        sick = [process.name for process in self.status.processes if process.state not in _HEALTHY]
        return ["supervisor", *sick] if self.is_supervisor_stopped() else sick

    def readiness(self) -> dict[str, Any]:
        """The body of /ready."""
        body: dict[str, Any] = {
            "status": "ready" if self.is_ready else self.stage if self.stage != "ready" else "recovering",
            "stage": self.stage,
            "progress": 1.0 if self.ring_turned else round(self.status.progress, 4),
        }
        if self.model is not None:
            body["model"] = self.model.name
        if sick := self.sick_processes():
            body["waiting_for"] = sick
        return body

    def close(self) -> None:
        if self.encoder is not None:
            self.encoder.close()
