"""A key's equal share of what is scarce: one rule for the places of the api, those of the engine, and the seats. Pure.

Used by api (before a prompt is tokenized) and by the scheduler's side of the engine (over all api processes).
"""

from __future__ import annotations

from collections.abc import Collection


def equal_share(num_places: int, holders: Collection[str], key: str) -> int:
    """How many of `num_places` the `key` may hold: 1/(k+1) of all for k keys, so that whoever comes next finds one.

    `holders`: the keys that hold some; `key` counts as one of them. At least one.
    """
    num_keys = len(holders) + (key not in holders)
    return max(1, num_places // (num_keys + 1))
