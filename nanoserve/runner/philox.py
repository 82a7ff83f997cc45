"""Counter-based uniform random numbers: Philox4x32-10 (Salmon et al., SC 2011, "Parallel random numbers: as easy
as 1, 2, 3"), keyed by (seed, position).

A draw is a pure function of the request's seed and the index of the output token, so it does not depend on the
batch, on preemption or on a restart. Imports no torch: the sim model uses it too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_ROUNDS = 10

UInt64 = npt.NDArray[np.uint64]


def philox4x32(counter: UInt64, key: tuple[UInt64, UInt64]) -> UInt64:
    """counter [4, N] and key ([N], [N]), 32-bit words in uint64 -> four random 32-bit words [4, N]."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return np.stack((c0, c1, c2, c3))


def uniforms(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits per (seed, position); seeds int64 [N], positions int64 [N] >= 0."""
    seed, position = seeds.astype(np.uint64), positions.astype(np.uint64)
    zero = np.zeros_like(seed)
    words = philox4x32(np.stack((position & _LOW, position >> _SHIFT, zero, zero)), (seed & _LOW, seed >> _SHIFT))
    bits = (words[0] << np.uint64(21)) | (words[1] >> np.uint64(11))
    scaled: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return scaled
