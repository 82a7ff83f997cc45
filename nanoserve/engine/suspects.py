"""A request that crashes the engine each time must not take its neighbours with it, nor the server.

Owner: the engine process. Before a step the ids that would be to blame for a crash are written to a file that outlives
the process. The next life reads it: every id in it has one strike more. Requests with a strike are let in one at a
time, each when the one before has lived through a step; one with two strikes is refused, and with it those with a
strike and the same prompt: the choices of one answer crash alike. Ids that have lived through the last step are only
blamed when there is no newcomer beside them, so a neighbour collects at most one strike.
The supervisor removes the file when the process was killed from outside: that is nobody's fault.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nanoserve.errors import RequestError
from nanoserve.ipc.channels import Inbox
from nanoserve.ipc.ids import api_index
from nanoserve.ipc.messages import AbortRequest, AddRequest, ApiGone, EngineInbox, Release
from nanoserve.sched.plan import Executor, StepPlan, StepResult

_log = logging.getLogger(__name__)

MAX_STRIKES = 2
_TRIAL_TURNS = 100  # a request on trial that never comes to a step (refused, ended) blocks the next for so long
_TURN_MS = 10  # at most, while anybody waits for a trial
_LENGTH_BYTES = 4


class StepRecord:
    """The ids to blame, in a file: written by one `pwrite`, so a crash leaves the old or the new ones."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._written: list[int] = []

    def read(self) -> list[int]:
        """What the last life wrote; empty when there was none or it cannot be read."""
        data = os.pread(self._fd, 1 << 20, 0)
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        try:
            return msgspec.msgpack.decode(data[_LENGTH_BYTES : _LENGTH_BYTES + length], type=list[int])
        except msgspec.MsgspecError:
            return []

    def write(self, request_ids: list[int]) -> None:
        """On a full disk the record stays as it is: a step is worth more than its record."""
        if request_ids != self._written:
            data = msgspec.msgpack.encode(request_ids)
            with contextlib.suppress(OSError):
                os.pwrite(self._fd, len(data).to_bytes(_LENGTH_BYTES, "little") + data, 0)
            self._written = request_ids

    def close(self) -> None:
        os.close(self._fd)


class Suspects:
    """Strikes of the lives before, and who is on trial in this one."""

    def __init__(self, record: StepRecord, strikes_file: Path) -> None:
        self._record = record
        self._strikes = _read_strikes(strikes_file)
        for request_id in record.read():
            self._strikes[request_id] = self._strikes.get(request_id, 0) + 1
        if self._strikes:
            with contextlib.suppress(OSError):
                strikes_file.write_bytes(msgspec.msgpack.encode(self._strikes))
            _log.warning("requests that were running in a crash: %s", self._strikes)
        record.write([])
        self._survivors: set[int] = set()
        self._held: deque[AddRequest] = deque()
        self._on_trial: int | None = None
        self._trial_turns = 0
        self._refused_prompts: set[int] = set()  # hashes

    @property
    def has_held(self) -> bool:
        return bool(self._held)

    @property
    def can_release(self) -> bool:
        return bool(self._held) and self._on_trial is None

    def refusal(self, message: AddRequest) -> RequestError | None:
        """The error of a request that is not tried again; None for all others."""
        num_strikes, prompt = self._strikes.get(message.request_id, 0), hash(message.prompt_token_ids)
        if num_strikes >= MAX_STRIKES:
            self._refused_prompts.add(prompt)
        elif not num_strikes or prompt not in self._refused_prompts:
            return None
        if self._on_trial == message.request_id:
            self._on_trial = None
        text = (
            f"This request, or one like it, was running in {MAX_STRIKES} crashes of the engine and is not tried again."
        )
        return RequestError(text, status=500, error_type="server_error", code="engine_crashed")

    def order(self, messages: Sequence[EngineInbox]) -> list[EngineInbox]:
        """What may be handled now: all but suspects that have to wait for their trial."""
        let_in: list[EngineInbox] = []
        for message in messages:
            if isinstance(message, AddRequest) and self._strikes.get(message.request_id, 0) == 1:
                self._held.append(message)
                continue
            if isinstance(message, AbortRequest | Release):
                let_in += self._take_held(message.request_ids)  # let in to be ended: each request has one end
            elif isinstance(message, ApiGone):
                of_the_dead = [
                    held.request_id for held in self._held if api_index(held.request_id) == message.api_index
                ]
                let_in += self._take_held(of_the_dead)
            let_in.append(message)
        if self._on_trial is not None:
            self._trial_turns += 1
            if self._trial_turns > _TRIAL_TURNS:
                self._on_trial = None
        if self.can_release:
            suspect = self._held.popleft()
            self._on_trial, self._trial_turns = suspect.request_id, 0
            let_in.append(suspect)
        return let_in

    def _take_held(self, request_ids: Sequence[int]) -> list[AddRequest]:
        if not self._held:
            return []
        wanted = set(request_ids)
        taken = [message for message in self._held if message.request_id in wanted]
        self._held = deque(message for message in self._held if message.request_id not in wanted)
        return taken

    def step_begins(self, request_ids: list[int]) -> None:
        newcomers = [request_id for request_id in request_ids if request_id not in self._survivors]
        self._record.write(newcomers or request_ids)

    def step_ended(self, request_ids: list[int]) -> None:
        self._survivors = set(request_ids)
        if self._on_trial in self._survivors:
            self._on_trial = None


def _read_strikes(path: Path) -> dict[int, int]:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=dict[int, int])
    except (OSError, msgspec.MsgspecError):
        return {}


class SuspectInbox:
    """The engine's inbox with the suspects held back; same methods as `ipc.channels.Inbox`."""

    def __init__(self, inbox: Inbox[EngineInbox], suspects: Suspects) -> None:
        self._inbox = inbox
        self._suspects = suspects

    @property
    def dropped(self) -> int:
        return self._inbox.dropped

    def wait(self, timeout_ms: int) -> bool:
        if self._suspects.can_release:
            return True
        return self._inbox.wait(min(timeout_ms, _TURN_MS) if self._suspects.has_held else timeout_ms)

    def drain(self) -> list[EngineInbox]:
        return self._suspects.order(self._inbox.drain())


class RecordingExecutor:
    """Keeps the record of who is in a step."""

    def __init__(self, executor: Executor, suspects: Suspects) -> None:
        self._executor = executor
        self._suspects = suspects

    def execute(self, plan: StepPlan) -> StepResult:
        request_ids = [row.request_id for row in plan.rows]
        self._suspects.step_begins(request_ids)
        result = self._executor.execute(plan)
        self._suspects.step_ended(request_ids)
        return result

    def close(self) -> None:
        self._executor.close()
