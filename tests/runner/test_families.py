"""Every family against transformers on random weights: one pass, chunks, shared blocks, mixed batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.runner import tiny

pytestmark = pytest.mark.slow
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=list(tiny.CONFIGS))
def reference(request):
    return tiny.make_reference(request.param)


def random_ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, tiny.VOCAB, length).tolist()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max().item() < TOLERANCE


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
def test_one_pass(reference, block_size):
    ids = random_ids(1, 71)
    backend = tiny.make_backend(reference, block_size=block_size)
    sequences = tiny.Sequences(backend, block_size, 256)
    (logits,) = sequences.run([(sequences.add(ids), 0, len(ids))])
    assert_close(logits, tiny.reference_logits(reference, ids))


def test_far_positions(reference):
    """Where a last bit of a rotary frequency shows."""
    ids = random_ids(6, 1500)
    sequences = tiny.Sequences(tiny.make_backend(reference, block_size=16), 16, 256)
    (logits,) = sequences.run([(sequences.add(ids), 0, len(ids))])
    assert_close(logits, tiny.reference_logits(reference, ids))


@pytest.mark.parametrize("chunks", [[1] * 45, [7, 1, 20, 3, 14], [44, 1]])
def test_chunks(reference, chunks):
    ids = random_ids(2, sum(chunks))
    sequences = tiny.Sequences(tiny.make_backend(reference), 4, 256)
    sequence, start, parts = sequences.add(ids), 0, []
    for count in chunks:
        parts += sequences.run([(sequence, start, count)])
        start += count
    assert_close(torch.cat(parts), tiny.reference_logits(reference, ids))


def test_prefix_from_shared_blocks(reference):
    """The second sequence computes only what lies behind the blocks of the first."""
    prefix = random_ids(3, 24)
    first, second = prefix + random_ids(4, 9), prefix + random_ids(5, 30)
    sequences = tiny.Sequences(tiny.make_backend(reference), 4, 256)
    owner = sequences.add(first)
    sequences.run([(owner, 0, len(first))])
    follower = sequences.add(second, shared_blocks=sequences.table(owner)[:6])
    (logits,) = sequences.run([(follower, 24, 30)])
    assert_close(logits, tiny.reference_logits(reference, second)[24:])


def test_mixed_batch(reference):
    """Prefill, chunk and decode rows side by side, across partitions of the keys and windows."""
    lengths = [300, 3, 64, 20, 21, 1]
    ids = [random_ids(10 + index, length) for index, length in enumerate(lengths)]
    sequences = tiny.Sequences(tiny.make_backend(reference), 4, 256)
    rows = [sequences.add(sequence) for sequence in ids]
    sequences.run([(rows[0], 0, 290), (rows[2], 0, 63)])
    sequences.run([(rows[0], 290, 9), (rows[3], 0, 10), (rows[4], 0, 20)])
    parts = [(rows[0], 299, 1), (rows[1], 0, 3), (rows[2], 63, 1), (rows[3], 10, 10), (rows[4], 20, 1), (rows[5], 0, 1)]
    for (row, start, count), logits in zip(parts, sequences.run(parts), strict=True):
        assert_close(logits, tiny.reference_logits(reference, ids[row])[start : start + count])


def test_bit_equal_alone_in_batch_and_in_chunks(reference):
    """Not close: equal. Long enough for several partitions and query tiles."""
    backend = tiny.make_backend(reference, num_blocks=1024)
    assert backend.batch_invariant
    lengths = [530, 3, 64, 259, 129, 1, 17]
    ids = [random_ids(20 + index, length) for index, length in enumerate(lengths)]
    sequences = tiny.Sequences(backend, 4, 1024)
    rows = [sequences.add(sequence) for sequence in ids]
    alone = [sequences.run([(row, 0, length)])[0] for row, length in zip(rows, lengths, strict=True)]
    together = sequences.run([(row, 0, length) for row, length in zip(rows, lengths, strict=True)])
    for row, logits in enumerate(together):
        assert torch.equal(logits, alone[row]), f"row {row}"
    done = [0] * len(rows)
    random = np.random.default_rng(7)
    while any(position < length for position, length in zip(done, lengths, strict=True)):
        live = [row for row in rows if done[row] < lengths[row]]
        chosen = [row for row in live if random.random() < 0.7] or live
        chunks = [(row, done[row], int(random.integers(1, min(150, lengths[row] - done[row]) + 1))) for row in chosen]
        for (row, start, count), logits in zip(chunks, sequences.run(chunks), strict=True):
            assert torch.equal(logits, alone[row][start : start + count]), f"row {row} at {start}+{count}"
            done[row] += count


def test_nan_of_one_request_stays_its_own(reference):
    """Blocks full of NaN, next to the row's own tokens and in reused blocks, do not reach other rows."""
    ids, other = random_ids(30, 30), random_ids(31, 50)
    backend = tiny.make_backend(reference)
    backend._cache.keys[:, : backend._cache.zero_slot].fill_(float("nan"))
    backend._cache.values[:, : backend._cache.zero_slot].fill_(float("nan"))
    sequences = tiny.Sequences(backend, 4, 256)
    rows = [sequences.add(ids), sequences.add(other)]
    sequences.run([(rows[0], 0, 29), (rows[1], 0, 49)])
    first, second = sequences.run([(rows[0], 29, 1), (rows[1], 49, 1)])
    assert_close(first, tiny.reference_logits(reference, ids)[29:])
    assert_close(second, tiny.reference_logits(reference, other)[49:])
