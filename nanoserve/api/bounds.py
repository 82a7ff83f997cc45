"""Least and greatest value of each number in a request: `validation` enforces them, `/openapi.json` tells them.

Owner process: api. `nanoserve.offline` has the same.
"""

from __future__ import annotations

import math
from typing import Any

from nanoserve.errors import RequestError

INT32 = 2**31 - 1
INT64 = 2**63 - 1
MAX_N = 128

WHOLE: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "max_tokens": (1, INT32),  # 0 where a prompt may be scored without an answer
    "min_tokens": (0, INT32),
    "top_k": (-1, INT32),
    "seed": (-INT64 - 1, INT64),
    "truncate_prompt_tokens": (-1, INT32),
    "stream_interval": (1, INT32),
    "priority": (-INT32, INT32),
}
REAL: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 10.0),  # logits are divided by it and must stay finite as float32
    "timeout_s": (0.0, 86_400.0),
    "queue_timeout_s": (0.0, 86_400.0),
}
ABOVE_LOW = frozenset({"top_p", "timeout_s", "queue_timeout_s"})  # the least value itself is refused
MAX_BIAS = 100.0  # of a logit, either way; what is beyond counts as this

_OTHER_NAMES = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
_FROM_ZERO = {("CompletionBody", "max_tokens")}  # with `echo`


def tell(struct: str, field: str, schema: dict[str, Any]) -> None:
    """Writes the bounds of a field, where it has some, into its JSON schema (`number or null`)."""
    name = _OTHER_NAMES.get(field, field)
    low, high = WHOLE.get(name) or REAL.get(name) or (None, None)
    if low is None:
        return
    low = 0 if (struct, field) in _FROM_ZERO else low
    (number,) = (kind for kind in schema["anyOf"] if kind["type"] in ("integer", "number"))
    number["exclusiveMinimum" if name in ABOVE_LOW else "minimum"] = low
    number["maximum"] = high


def whole(name: str, value: int | None, default: int, low: int, high: int) -> int:
    """An integer within [low, high]."""
    if value is None:
        return default
    if value < low:
        raise RequestError(f"{name} must be at least {low}, got {_short(value)}.", param=name)
    if value > high:
        raise RequestError(f"{name} must be at most {high}, got {_short(value)}.", param=name)
    return value


def real(name: str, value: float | None, default: float) -> float:
    """A finite number within its bounds."""
    if value is None:
        return default
    low, high = REAL[name]
    open_low = name in ABOVE_LOW
    if not math.isfinite(value) or value > high or value < low or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value:g}.", param=name)
    return value


def _short(value: int) -> str:
    return str(value) if -INT64 <= value <= INT64 else "a larger number"
