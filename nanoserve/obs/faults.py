"""Faults on purpose, for tests: `--fault PROCESS:ACTION[=VALUE]@TURN[!]`.

PROCESS is a role (`engine`) or a process (`api-1`). TURN counts turns of its loop (0: at the start), messages on an
edge, or steps. A fault happens in the first life of a process only; with `!` in every life. Owner: the child that the
fault is for; without `--fault` no process does anything of this.

    engine:kill@40          SIGKILL at turn 40                detok:stick@5      its loop hangs (the lock is free)
    engine:hold=3@40        3 s in native code with the lock  engine:raise@40    an exception nobody expects
    detok:drop=api@7        message 7 to api is not sent      dup, delay (behind the next two), corrupt: likewise
    engine:nan@12           the first row of step 12 fails    engine:fail-step@12, engine:poison=ID@0! (every step
    api:disk-full@1         no file may grow any more         with a request whose prompt holds token ID kills)
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from nanoserve.errors import ConfigError
from nanoserve.ipc.link import Watchdog

TURN_ACTIONS = ("kill", "stick", "hold", "raise", "disk-full")
EDGE_ACTIONS = ("drop", "dup", "delay", "corrupt")
STEP_ACTIONS = ("nan", "fail-step", "poison")
_SYNTAX = re.compile(
    r"(?P<process>\w+(?:-\d+)?):(?P<action>[a-z-]+)(?:=(?P<value>[\w.-]+))?@(?P<turn>\d+)(?P<always>!?)"
)
_DELAYED_BY = 2  # messages that overtake a delayed one


@dataclass(frozen=True, slots=True)
class Fault:
    process: str
    action: str
    value: str
    turn: int
    always: bool  # in every life, not only in the first

    def concerns(self, name: str, incarnation: int) -> bool:
        return self.process in (name, name.rpartition("-")[0]) and (self.always or incarnation == 1)


def parse_fault(text: str) -> Fault:
    """ConfigError when it is not one of the forms above."""
    match = _SYNTAX.fullmatch(text)
    if match is None or match["action"] not in (*TURN_ACTIONS, *EDGE_ACTIONS, *STEP_ACTIONS):
        raise ConfigError(f"--fault {text}: not PROCESS:ACTION[=VALUE]@TURN[!] with a known action")
    return Fault(match["process"], match["action"], match["value"] or "", int(match["turn"]), bool(match["always"]))


def faults_for(texts: Iterable[str], name: str, incarnation: int) -> list[Fault]:
    """The faults that this life of this process is to have."""
    return [fault for fault in map(parse_fault, texts) if fault.concerns(name, incarnation)]


class FaultyWatchdog:
    """Implements `Watchdog`: passes everything on and lets the loop's own turn be where its faults happen."""

    def __init__(self, inner: Watchdog, faults: Iterable[Fault]) -> None:
        self._inner = inner
        self._faults = [fault for fault in faults if fault.action in TURN_ACTIONS]
        self._turn = 0
        self._happen_now()

    def feed(self) -> None:
        self._inner.feed()
        self._turn += 1
        self._happen_now()

    def _happen_now(self) -> None:
        for fault in self._faults:
            if fault.turn == self._turn:
                _happen(fault)

    def idle(self) -> AbstractContextManager[None]:
        return self._inner.idle()

    def busy(self, what: str, limit_s: float) -> AbstractContextManager[None]:
        return self._inner.busy(what, limit_s)


def _happen(fault: Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault.action == "raise":
        raise RuntimeError("a fault on purpose")
    elif fault.action == "disk-full":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    else:
        ends = time.monotonic() + float(fault.value or "inf")
        native = ctypes.PyDLL(None)  # keeps the interpreter lock during the call
        while time.monotonic() < ends:
            if fault.action == "hold":
                native.usleep(int(min(ends - time.monotonic(), 3600.0) * 1e6))
            else:
                time.sleep(0.1)


class FaultyEdge:
    """Decides what becomes of each frame on the edges that have faults; plugged into `ipc.channels.Outbox`."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self._faults = [fault for fault in faults if fault.action in EDGE_ACTIONS]
        self._sent: dict[str, int] = {}
        self._held: list[tuple[str, int, bytes]] = []

    def __call__(self, endpoint: str, frame: bytes, send: Callable[[bytes], object]) -> None:
        number = self._sent[endpoint] = self._sent.get(endpoint, 0) + 1
        target = endpoint.rpartition("/")[2].removesuffix(".sock")
        actions = [
            fault.action
            for fault in self._faults
            if fault.turn == number and fault.value in (target, target.rpartition("-")[0])
        ]
        if "delay" in actions:
            self._held.append((endpoint, number + _DELAYED_BY, frame))
        elif "corrupt" in actions:
            send(b"\xc1" + frame[1:])
        elif "drop" not in actions:
            send(frame)
            if "dup" in actions:
                send(frame)
        for item in [held for held in self._held if held[0] == endpoint and held[1] <= number]:
            self._held.remove(item)
            send(item[2])
