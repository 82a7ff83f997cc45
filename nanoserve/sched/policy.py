"""The order of requests: who runs first, and who gives way when memory runs out. Pure; used by the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nanoserve.sched.request import Request

PolicyKey = tuple[int, int, int]
Policy = Callable[[Request], PolicyKey]


def fcfs(request: Request) -> PolicyKey:
    """First come, first served; `sequence` decides between equal arrivals. Probes of health come first."""
    return (-request.is_probe, request.arrival_ns, request.sequence)


def priority(request: Request) -> PolicyKey:
    """Lower priority values first, then by arrival."""
    return (request.priority, request.arrival_ns, request.sequence)


# `fair`: the priorities are tags of virtual time, which the api gives by client
POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority, "fair": priority}


def victim(running: Iterable[Request], policy: Policy) -> Request:
    """The running request that gives its memory back: the last in the policy's order.

    The first in that order is never chosen while others run, so it always gets on, and so everybody does in time.
    """
    return max(running, key=policy)
