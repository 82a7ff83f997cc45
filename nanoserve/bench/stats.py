"""Order statistics for benchmark reports."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], q: float) -> float:
    """Linear-interpolated quantile, `q` in 0..1; NaN when there are no values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * q
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def spread(values: Sequence[float], digits: int = 1) -> str:
    """`median (min..max)`."""
    return f"{percentile(values, 0.5):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"
