"""The KV blocks: who holds which, which contents are known, which is reused next. Pure; owned by the scheduler.

A block is free (nobody holds it) or used (`num_holders` > 0). A full block may be *cached*: its key says which tokens
lie in it and before it. A cached block keeps its key after its last holder has gone, until its memory is needed.

The key is a hash chain over (parent key, the block's token ids), begun with the cache salt. It is cryptographic, so
that nobody can craft a collision, and the ids are compared on a hit all the same: a lookup that is wrong once in
2**64 is still wrong text. The rejected alternative, a radix tree over tokens, shares parts of blocks, at the price of
node splits, locks and an eviction walk; with blocks of 16 the chain loses at most 15 tokens a hit.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BlockKey = bytes
ChainHash = Callable[[BlockKey, Sequence[int]], BlockKey]


def chain_hash(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """The key of a block that holds `token_ids` after the block with key `parent`."""
    return blake2b(_pack(token_ids), key=parent, digest_size=16).digest()


def _pack(token_ids: Sequence[int]) -> bytes:
    return array("q", token_ids).tobytes()


def root_key(cache_salt: str) -> BlockKey:
    """The parent of first blocks. Requests with different salts share nothing."""
    return blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache-salt").digest()


@dataclass(slots=True)
class Block:
    """One block. `key` is None while its contents are not known to be a full block of the cache."""

    num_holders: int = 0
    key: BlockKey | None = None
    parent: BlockKey | None = None
    token_ids: bytes = b""  # packed: a tuple of ints would take seven times the memory, for each block of the cache


class BlockPool:
    """Reference-counted blocks, the prefix cache over them, and the order in which free ones are reused.

    Free blocks wait in an OrderedDict: O(1) to take the oldest, to take one out on a cache hit, and to put back at
    either end (a plain dict takes its first key in O(holes), a heap cannot give up a middle entry).
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool = True, hasher: ChainHash = chain_hash
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens can hold nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self._hasher = hasher
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[BlockKey, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be given away now; cached ones without a holder among them."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def is_free(self, block_id: int) -> bool:
        return block_id in self._free

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, the longest unused first; what they had cached is forgotten. The caller checked."""
        assert count <= len(self._free), f"{count} blocks asked, {len(self._free)} free"
        block_ids = []
        for _ in range(count):
            block_id, _none = self._free.popitem(last=False)
            self._forget(block_id)
            self._blocks[block_id].num_holders = 1
            block_ids.append(block_id)
        return block_ids

    def free(self, block_ids: Sequence[int], *, discard: bool = False) -> None:
        """Gives up one hold on each block of a request's table.

        The tail goes first, so it is reused first and the beginnings that many prompts share live longest; blocks
        without a key hold nothing worth keeping and go to the front. `discard` forgets the contents too: they come
        from a computation that went wrong.
        """
        for block_id in reversed(block_ids):
            block = self._blocks[block_id]
            assert block.num_holders > 0, f"block {block_id} freed twice"
            block.num_holders -= 1
            if discard:
                self._forget(block_id)
            if block.num_holders == 0:
                self._free[block_id] = None
                if block.key is None:
                    self._free.move_to_end(block_id, last=False)

    def extend_keys(self, keys: list[BlockKey], token_ids: Sequence[int], cache_salt: str) -> None:
        """Appends the keys of those full blocks of `token_ids` that `keys` does not cover yet."""
        size = self.block_size
        parent = keys[-1] if keys else root_key(cache_salt)
        for start in range(len(keys) * size, len(token_ids) - size + 1, size):
            parent = self._hasher(parent, token_ids[start : start + size])
            keys.append(parent)

    def lookup(self, keys: Sequence[BlockKey], token_ids: Sequence[int], max_blocks: int) -> list[int]:
        """The longest run of cached blocks, from the first, that holds `token_ids`. Takes no hold on them."""
        hits: list[int] = []
        if not self.caching:
            return hits
        for index, key in enumerate(keys[:max_blocks]):
            block_id = self._cached.get(key)
            if block_id is None:
                break
            block = self._blocks[block_id]
            ids = token_ids[index * self.block_size : (index + 1) * self.block_size]
            if block.token_ids != _pack(ids) or (index > 0 and block.parent != keys[index - 1]):
                break
            hits.append(block_id)
        return hits

    def hold(self, block_ids: Sequence[int]) -> None:
        """Takes a hold on cached blocks, free or shared, that `lookup` found."""
        for block_id in block_ids:
            self._blocks[block_id].num_holders += 1
            self._free.pop(block_id, None)

    def register(self, block_id: int, key: BlockKey, parent: BlockKey | None, token_ids: Sequence[int]) -> None:
        """Makes a full, written block findable. Where an equal block is known already, that one stays."""
        block = self._blocks[block_id]
        assert block.num_holders > 0, f"block {block_id} is registered without a holder"
        if self.caching and block.key is None and key not in self._cached:
            block.key, block.parent, block.token_ids = key, parent, _pack(token_ids)
            self._cached[key] = block_id

    def forget_free(self) -> int:
        """Empties the prefix cache but for blocks that have a holder; returns how many it forgot."""
        num_cached = len(self._cached)
        for block_id in self._free:
            self._forget(block_id)
        return num_cached - len(self._cached)

    def _forget(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if block.key is not None:
            del self._cached[block.key]
            block.key, block.parent, block.token_ids = None, None, b""

    def check_invariants(self, tables: Sequence[Sequence[int]]) -> None:
        """AssertionError unless the holds equal `tables` (the block tables of all holders) and all maps agree."""
        holders = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block stands twice in one table: {table}"
            for block_id in table:
                holders[block_id] += 1
        for block_id, block in enumerate(self._blocks):
            assert block.num_holders == holders[block_id], (
                f"block {block_id}: {block.num_holders} != {holders[block_id]}"
            )
            assert (block_id in self._free) == (block.num_holders == 0), (
                f"block {block_id} is free and held, or neither"
            )
            assert block.key is None or self._cached.get(block.key) == block_id, f"block {block_id} cannot be found"
        assert all(self._blocks[block_id].key == key for key, block_id in self._cached.items()), "a stale cache entry"
        assert self.num_used + self.num_free == self.num_blocks
