"""What every api process knows of the whole server: one ServerStatus, sent again whenever it changes.

Owner: the supervisor.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import zmq

from nanoserve.children import Child
from nanoserve.ipc.channels import Outbox
from nanoserve.ipc.endpoints import Endpoints
from nanoserve.ipc.messages import EngineFacts, ServerStatus


class StatusBoard:
    def __init__(self, context: zmq.Context[Any], endpoints: Endpoints, num_apis: int) -> None:
        self.status = ServerStatus(stage="starting")
        self._outboxes = [Outbox(context, endpoints.api(index)) for index in range(num_apis)]

    def publish(
        self,
        children: Iterable[Child],
        *,
        stage: str = "",
        progress: float | None = None,
        model_dir: str = "",
        engine: EngineFacts | None = None,
        draining: bool = False,
        failed: str = "",
    ) -> None:
        """Tells every api what has changed; what is not given stays. A status that is the same is not sent again."""
        old = self.status
        status = ServerStatus(
            stage=stage or old.stage,
            progress=old.progress if progress is None else progress,
            model_dir=model_dir or old.model_dir,
            engine=engine or old.engine,
            processes=[child.facts() for child in children if child.role != "prepare"],
            draining=draining or old.draining,
            failed=failed or old.failed,
        )
        if status != old:
            self.status = status
            for outbox in self._outboxes:
                outbox.send(status)

    def close(self) -> None:
        for outbox in self._outboxes:
            outbox.close()
