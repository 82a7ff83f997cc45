"""The counter-based random numbers: known answers, and independence of everything but (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest

from nanoserve.runner.philox import philox4x32, uniforms

# Known answers of the Random123 distribution (kat_vectors, philox4x32 with 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter, key, expected):
    words = philox4x32(
        np.array([[word] for word in counter], dtype=np.uint64),
        tuple(np.array([word], dtype=np.uint64) for word in key),
    )
    assert words[:, 0].tolist() == list(expected)


@pytest.mark.rule(37)
def test_a_draw_depends_on_seed_and_position_only():
    seeds = np.array([0, 1, -1, 2**63 - 1, -(2**63), 7, 7], dtype=np.int64)
    positions = np.array([0, 5, 5, 1, 1, 0, 1], dtype=np.int64)
    together = uniforms(seeds, positions)
    alone = [float(uniforms(seeds[i : i + 1], positions[i : i + 1])[0]) for i in range(len(seeds))]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)
    assert ((together >= 0) & (together < 1)).all()


def test_draws_are_uniform():
    draws = uniforms(np.repeat(np.arange(200), 200), np.tile(np.arange(200), 200))
    counts, _ = np.histogram(draws, bins=50, range=(0, 1))
    expected = draws.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 100  # chi-square, 49 degrees: p about 2e-5
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.02
