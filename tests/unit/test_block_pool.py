"""Reference counts, the prefix cache and the order of reuse."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest

from nanoserve.sched.block_pool import BlockKey, BlockPool, root_key


def fill(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """Allocates and registers the full blocks of `token_ids`; returns the table."""
    keys: list[BlockKey] = []
    pool.extend_keys(keys, token_ids, salt)
    table = pool.allocate(len(keys))
    for index, block_id in enumerate(table):
        ids = token_ids[index * pool.block_size : (index + 1) * pool.block_size]
        pool.register(block_id, keys[index], keys[index - 1] if index else None, ids)
    return table


def hits(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    keys: list[BlockKey] = []
    pool.extend_keys(keys, token_ids, salt)
    return pool.lookup(keys, token_ids, len(keys))


@pytest.mark.rule(33)
def test_a_block_is_found_by_all_the_tokens_before_it() -> None:
    pool = BlockPool(8, 2)
    table = fill(pool, [1, 2, 3, 4])
    assert hits(pool, [1, 2, 3, 4, 5]) == table
    assert hits(pool, [1, 2, 9, 9]) == table[:1]
    assert hits(pool, [9, 9, 3, 4]) == [], "the second block alone is not a prefix"
    assert hits(pool, [1, 2, 3, 4], salt="tenant") == []


def test_free_blocks_stay_cached_until_they_are_needed() -> None:
    pool = BlockPool(3, 2)
    table = fill(pool, [1, 2, 3, 4])
    pool.free(table)
    assert pool.num_free == 3
    found = hits(pool, [1, 2, 3, 4])
    assert found == table
    pool.hold(found)
    assert (pool.num_free, pool.num_used) == (1, 2)
    pool.check_invariants([table])


def test_the_tail_of_a_prefix_is_reused_before_its_beginning() -> None:
    pool = BlockPool(4, 2)
    table = fill(pool, [1, 2, 3, 4, 5, 6])
    pool.free(table)
    pool.allocate(2)  # the never used block, then the tail
    assert hits(pool, [1, 2, 3, 4, 5, 6]) == table[:2]
    pool.allocate(1)
    assert hits(pool, [1, 2, 3, 4, 5, 6]) == table[:1]


def test_the_longest_unused_prefix_goes_first_and_blocks_without_contents_before_it() -> None:
    pool = BlockPool(3, 2)
    old, new = fill(pool, [1, 2]), fill(pool, [3, 4])
    partial = pool.allocate(1)
    pool.free(old)
    pool.free(new)
    pool.free(partial)
    assert pool.allocate(1) == partial
    assert pool.allocate(1) == old
    assert hits(pool, [3, 4]) == new


@pytest.mark.rule(33)
def test_ids_are_compared_on_a_hit() -> None:
    """A hash that always collides gives misses, never another prompt's blocks."""

    def collide(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
        return b"same"

    pool = BlockPool(4, 2, hasher=collide)
    table = fill(pool, [1, 2])
    assert hits(pool, [1, 2]) == table
    assert hits(pool, [1, 3]) == []


@pytest.mark.rule(33)
def test_ids_before_the_block_are_compared_through_the_parent() -> None:
    def last_ids_only(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
        return bytes(token_ids)

    pool = BlockPool(8, 1, hasher=last_ids_only)
    fill(pool, [1, 7])
    fill(pool, [2])
    assert len(hits(pool, [2, 7])) == 1, "block 7 follows 1, not 2"


def test_of_two_equal_blocks_the_first_stays_findable() -> None:
    pool = BlockPool(4, 2)
    first, second = fill(pool, [1, 2]), fill(pool, [1, 2])
    assert hits(pool, [1, 2]) == first
    pool.free(second)
    pool.free(first)
    assert hits(pool, [1, 2]) == first
    pool.check_invariants([])


def test_discarded_blocks_are_not_found_again() -> None:
    pool = BlockPool(4, 2)
    pool.free(fill(pool, [1, 2]), discard=True)
    assert hits(pool, [1, 2]) == []
    pool.check_invariants([])


def test_without_caching_nothing_is_found() -> None:
    pool = BlockPool(4, 2, caching=False)
    fill(pool, [1, 2])
    assert hits(pool, [1, 2]) == []


def test_misuse_is_an_assertion() -> None:
    pool = BlockPool(2, 2)
    table = pool.allocate(2)
    with pytest.raises(AssertionError, match="0 free"):
        pool.allocate(1)
    pool.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)
    with pytest.raises(AssertionError, match="!="):
        pool.check_invariants([[0]])
    with pytest.raises(ValueError, match="hold nothing"):
        BlockPool(0, 16)


def test_salts_may_be_any_text() -> None:
    assert len({root_key(""), root_key("a"), root_key("\ud800"), root_key("b" * 10_000)}) == 4


def test_the_books_of_a_cached_block_are_small() -> None:
    """A pool of a hundred thousand blocks fills with time: what each costs is what the engine's memory grows by."""
    count, size = 2000, 16
    pool = BlockPool(count, size)
    tracemalloc.start()
    for number in range(count):
        (block_id,) = pool.allocate(1)
        ids = [1000 + number * size + place for place in range(size)]
        keys: list[BlockKey] = []
        pool.extend_keys(keys, ids, "")
        pool.register(block_id, keys[0], None, ids)
        pool.free([block_id])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 450 * count
