"""How often a process may be started again, and how long to wait before it: pure, time is a parameter.

Owner: the supervisor. The first restart is immediate, because streams are waiting; quick repeats wait longer, because a
process that cannot live must not eat the machine; too many end the server.
"""

from __future__ import annotations

from collections import defaultdict, deque

WINDOW_S = 600.0
_QUICK_S = 30.0  # restarts that lie further back do not make the next one wait
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 10.0


class RestartBudget:
    """At most `max_restarts` of each process within WINDOW_S."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)

    def spend(self, name: str, now: float) -> float | None:
        """Takes one restart of `name`: seconds to wait before it, or None when the budget is spent."""
        recent = self._restarts[name]
        while recent and recent[0] <= now - WINDOW_S:
            recent.popleft()
        if len(recent) >= self._max_restarts:
            return None
        quick = sum(restart > now - _QUICK_S for restart in recent)
        recent.append(now)
        if quick == 0:
            return 0.0
        return min(_FIRST_BACKOFF_S * 2.0 ** min(quick - 1, 16), _LONGEST_BACKOFF_S)


class RestartPlan:
    """The restarts that wait for their time."""

    def __init__(self, max_restarts: int) -> None:
        self._budget = RestartBudget(max_restarts)
        self._due: dict[str, float] = {}

    def add(self, name: str, now: float) -> float | None:
        """Plans a restart: seconds until then, or None when the budget is spent."""
        wait_s = self._budget.spend(name, now)
        if wait_s is not None:
            self._due[name] = now + wait_s
        return wait_s

    def take_due(self, now: float) -> list[str]:
        names = [name for name, due in self._due.items() if due <= now]
        for name in names:
            del self._due[name]
        return names

    def patience_ms(self, now: float, most_ms: int) -> int:
        """For how long nothing is due, at most `most_ms`, at least one."""
        soonest_s = min(self._due.values(), default=now + most_ms / 1000) - now
        return max(1, min(most_ms, int(soonest_s * 1000) + 1))

    def clear(self) -> None:
        self._due.clear()
