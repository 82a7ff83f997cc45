"""The block tables of requests: opened at the start of a run, grown step by step, closed at its end. Pure.

Owned by the scheduler, which decides who runs; this module only knows how many blocks that takes and which of them
the prefix cache already has.
"""

from __future__ import annotations

from nanoserve.sched.block_pool import BlockKey, BlockPool
from nanoserve.sched.request import Request


class BlockTables:
    """Moves blocks between the pool and `Request.block_ids`. Mutates the requests it is given."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.pool = BlockPool(num_blocks, block_size, caching=caching)
        self._block_size = block_size

    def cached_blocks(self, request: Request) -> list[int]:
        """Prefix cache hits; never the block of the last token, whose logits are needed, nor where scores are."""
        if not self.pool.caching or request.wants_prompt_scores:
            return []
        self.pool.extend_keys(request.block_keys, request.token_ids, request.cache_salt)
        max_blocks = (request.num_tokens - 1) // self._block_size
        return self.pool.lookup(request.block_keys, request.token_ids, max_blocks)

    def open(self, request: Request, hits: list[int], num_spare: int) -> bool:
        """Gives a waiting request blocks for all the tokens it has; False, with nothing changed, where they do not fit.

        `hits` are its `cached_blocks`, which count as computed. `num_spare` blocks stay free.
        """
        num_new = self._num_blocks(request.num_tokens) - len(hits)
        num_free = self.pool.num_free - sum(map(self.pool.is_free, hits))
        if num_new + num_spare > num_free:
            return False
        self.pool.hold(hits)
        request.block_ids = hits + self.pool.allocate(num_new)
        request.num_computed_tokens = len(hits) * self._block_size
        request.num_registered_blocks = len(hits)
        return True

    def keys_in_step(self, request: Request, num_tokens: int) -> list[BlockKey]:
        """Keys of the blocks that become findable once a step has computed `num_tokens` more of this request."""
        num_full = (request.num_computed_tokens + num_tokens) // self._block_size
        return request.block_keys[request.num_registered_blocks : num_full]

    def is_better_later(self, request: Request, hits: list[int], keys_in_step: set[BlockKey]) -> bool:
        """Whether at least half of what this request would compute is being computed by others in this step.

        Then it waits a step and finds it. The alternative, to share blocks within the step that writes them, holds
        only for backends that write all rows of a layer before they read any, and must be undone when a step fails.
        """
        num_shared = 0
        for key in request.block_keys[len(hits) : (request.num_tokens - 1) // self._block_size]:
            if key not in keys_in_step:
                break
            num_shared += 1
        num_missing = request.num_tokens - len(hits) * self._block_size
        return num_shared > 0 and 2 * num_shared * self._block_size >= num_missing and not request.wants_prompt_scores

    def grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """The blocks to append for `num_tokens` more computed tokens; None where the pool has too few."""
        room = len(request.block_ids) * self._block_size - request.num_computed_tokens
        if num_tokens <= room:
            return []
        num_new = self._num_blocks(num_tokens - room)
        if num_new > self.pool.num_free:
            return None
        new_block_ids = self.pool.allocate(num_new)
        request.block_ids += new_block_ids
        return new_block_ids

    def room_for(self, request: Request, num_tokens: int, num_spare: int) -> int:
        """How many of `num_tokens` more computed tokens `grow` can take while `num_spare` blocks stay free."""
        num_blocks = len(request.block_ids) + max(0, self.pool.num_free - num_spare)
        return min(num_tokens, num_blocks * self._block_size - request.num_computed_tokens)

    def register_full_blocks(self, request: Request) -> None:
        """Makes full blocks findable, once the step that wrote their last token has ended."""
        size = self._block_size
        num_full = request.num_computed_tokens // size
        if num_full == request.num_registered_blocks or not self.pool.caching:
            return
        keys = request.block_keys
        self.pool.extend_keys(keys, request.token_ids, request.cache_salt)
        for index in range(request.num_registered_blocks, num_full):
            ids = request.token_ids[index * size : (index + 1) * size]
            self.pool.register(request.block_ids[index], keys[index], keys[index - 1] if index else None, ids)
        request.num_registered_blocks = num_full

    def close(self, request: Request, *, discard: bool = False) -> None:
        """Gives all of a request's blocks back; `discard` also takes what it computed out of the cache."""
        self.pool.free(request.block_ids, discard=discard)
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_registered_blocks = 0

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
