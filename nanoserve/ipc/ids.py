"""Request ids: 63 bits that name the api process, its incarnation and a counter.

Owner: each api process allocates its own. The api index inside the id is how the detokenizer knows where a
row goes; the incarnation is how a restarted api process never meets rows of its predecessor.
"""

from __future__ import annotations

from itertools import count

from nanoserve.ipc.messages import RequestId

_COUNTER_BITS = 40
_INCARNATION_BITS = 15
_API_BITS = 8
MAX_API_INDEX = (1 << _API_BITS) - 1


class RequestIdAllocator:
    """Hands out ids for one incarnation of one api process."""

    def __init__(self, api_index: int, incarnation: int) -> None:
        if not 0 <= api_index <= MAX_API_INDEX:
            raise ValueError(f"api index {api_index} does not fit {_API_BITS} bits")
        self._prefix = ((api_index << _INCARNATION_BITS) | (incarnation % (1 << _INCARNATION_BITS))) << _COUNTER_BITS
        self._counter = count(1)

    def next(self) -> RequestId:
        return RequestId(self._prefix | next(self._counter))


def api_index(request_id: int) -> int:
    """Which api process owns this request."""
    return request_id >> (_COUNTER_BITS + _INCARNATION_BITS)


def api_incarnation(request_id: int) -> int:
    """Which life of that api process made it (modulo 2**15)."""
    return (request_id >> _COUNTER_BITS) & ((1 << _INCARNATION_BITS) - 1)


def belongs_to_life(request_id: int, index: int, incarnation: int) -> bool:
    """Whether api process `index` made this id in its life `incarnation` or an earlier one."""
    age = (incarnation - api_incarnation(request_id)) % (1 << _INCARNATION_BITS)
    return api_index(request_id) == index and age < 1 << (_INCARNATION_BITS - 1)
