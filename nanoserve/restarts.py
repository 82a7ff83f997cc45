"""How often a process may be started again, and how long to wait before it: pure, time is a parameter.

Owner: the supervisor. The first restart is immediate, because streams are waiting; short lives wait longer, because a
process that cannot live must not eat the machine; too many end the server.
"""

from __future__ import annotations

from collections import defaultdict, deque

WINDOW_S = 600.0
_SHORT_LIFE_S = 1.0  # who was ready for longer was not started in vain: the next start need not wait
_FIRST_BACKOFF_S = 0.25
_LONGEST_BACKOFF_S = 10.0


class RestartBudget:
    """At most `max_restarts` of each process within WINDOW_S."""

    def __init__(self, max_restarts: int) -> None:
        self._max_restarts = max_restarts
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)
        self._short_lives: defaultdict[str, int] = defaultdict(int)

    def spend(self, name: str, now: float, lived_s: float = 0.0) -> float | None:
        """Takes one restart of `name`, which was ready for `lived_s`: seconds to wait before it, or None when the
        budget is spent."""
        recent = self._restarts[name]
        while recent and recent[0] <= now - WINDOW_S:
            recent.popleft()
        if len(recent) >= self._max_restarts:
            return None
        recent.append(now)
        short = self._short_lives[name] = 0 if lived_s >= _SHORT_LIFE_S else self._short_lives[name] + 1
        if short <= 1:
            return 0.0
        return min(_FIRST_BACKOFF_S * 2.0 ** min(short - 2, 16), _LONGEST_BACKOFF_S)


class RestartPlan:
    """The restarts that wait for their time."""

    def __init__(self, max_restarts: int) -> None:
        self._budget = RestartBudget(max_restarts)
        self._due: dict[str, float] = {}

    def add(self, name: str, now: float, lived_s: float = 0.0) -> float | None:
        """Plans a restart: seconds until then, or None when the budget is spent."""
        wait_s = self._budget.spend(name, now, lived_s)
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
