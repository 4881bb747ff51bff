"""The requests' side of the KV cache: finding cached prefixes, growing, registering, letting go."""

from __future__ import annotations

from server.engine.kv.block_pool import BlockPool
from server.engine.kv.prefix import block_hash, root_hash
from server.engine.request import Request
from server.engine.step import BlockCopy


class KVCache:
    """Gives requests their blocks. Only committed tokens enter the prefix cache."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, last_slot_looks_ahead: bool = False
    ) -> None:
        """Make an empty cache.

        Args:
            num_blocks: blocks of the pool, the unused one included.
            block_size: tokens a block.
            enable_prefix_caching: whether full blocks can be found again.
            last_slot_looks_ahead: the draft's entry in a block's last slot is made from the token after the block
                (EAGLE, MTP), so a hit cannot take it over.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.last_slot_looks_ahead = last_slot_looks_ahead
        self.queries = 0
        self.hits = 0

    @property
    def capacity(self) -> int:
        """Tokens of one sequence that has the whole pool."""
        return self.pool.usable * self.block_size

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens need."""
        return -(-tokens // self.block_size)

    def admit(self, request: Request) -> tuple[BlockCopy, ...] | None:
        """Give a request without blocks the cached prefix of its tokens and room for the rest of them.

        A fully cached sequence still needs the logits of its last token, and a draft that looks ahead the hidden
        state of the last one found: the block is copied, since writing that token again into a shared block would
        touch other requests, and computing starts with just that token.

        Returns:
            Blocks to copy before the step, or None when too few blocks are free (nothing is taken then).
        """
        found = self._find_prefix(request)
        length = len(request.tokens)
        reached = len(found) * self.block_size
        copied = found.pop() if found and (reached == length or self.last_slot_looks_ahead) else None
        new = self.blocks_for(length) - len(found)
        # Found blocks that nobody holds are on the free list too, and so is the one to copy from while it is read.
        self.pool.share(found)
        if new > self.pool.free:
            self.pool.release(found)
            return None
        request.blocks = found + self.pool.take(new)
        request.computed = reached if copied is None else reached - 1
        request.draft_computed = request.computed
        request.cached_blocks = len(found)
        copies: tuple[BlockCopy, ...] = ()
        if copied is not None:
            copies = (BlockCopy(copied, request.blocks[len(found)]),)
        if self._uses_prefixes(request):
            self.queries += length
            self.hits += request.computed
        return copies

    def grow(self, request: Request, tokens: int) -> bool:
        """Make room for the first `tokens` tokens; False when no block is free (nothing is taken then)."""
        missing = self.blocks_for(tokens) - len(request.blocks)
        if missing > self.pool.free:
            return False
        if missing > 0:
            request.blocks += self.pool.take(missing)
        return True

    def register(self, request: Request) -> None:
        """Make the full blocks of a request's computed tokens findable."""
        if not self.enable_prefix_caching:
            return
        full = request.computed // self.block_size
        if full > request.cached_blocks:
            self._hash_blocks(request, full)
            for i in range(request.cached_blocks, full):
                self.pool.remember(request.blocks[i], request.block_hashes[i])
            request.cached_blocks = full

    def release(self, request: Request) -> None:
        """Take all blocks back; what they hold stays findable until they are reused."""
        self.pool.release(request.blocks)
        request.blocks = []
        request.computed = request.draft_computed = 0
        request.cached_blocks = 0

    def _uses_prefixes(self, request: Request) -> bool:
        # Prompt log-probabilities need the logits of every prompt token.
        return self.enable_prefix_caching and request.params.prompt_logprobs is None

    def _find_prefix(self, request: Request) -> list[int]:
        found: list[int] = []
        if self._uses_prefixes(request):
            self._hash_blocks(request, len(request.tokens) // self.block_size)
            for name in request.block_hashes:
                block = self.pool.find(name)
                if block is None:
                    break
                found.append(block)
        return found

    def _hash_blocks(self, request: Request, count: int) -> None:
        hashes, size = request.block_hashes, self.block_size
        while len(hashes) < count:
            parent = hashes[-1] if hashes else root_hash(request.source.cache_salt)
            start = len(hashes) * size
            hashes.append(block_hash(parent, request.tokens[start : start + size]))
