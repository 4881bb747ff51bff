"""Which blocks of the KV cache are free, who holds the others, and which free ones still hold a known prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference-counted blocks. A freed block that holds a known prefix stays findable until it is taken again.

    Block 0 is never given out: padded entries of block tables point to it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        # Taken from the front: blocks that hold nothing first, then the least recently used prefix.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def usable(self) -> int:
        """Blocks that can ever be given out."""
        return self.num_blocks - 1

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.free / self.usable

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks whose content is no longer of use.

        Raises:
            MemoryError: fewer are free; nothing is taken.
        """
        if count > self.free:
            raise MemoryError(f"{count} blocks wanted, {self.free} free")
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._references[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks found by `find`, beside whoever holds them already."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks, given in the order of the sequence: its tail is reused first."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, block_hash: bytes) -> int | None:
        """The block that holds this prefix, in use or not."""
        return self._by_hash.get(block_hash)

    def remember(self, block: int, block_hash: bytes) -> None:
        """Make a full block findable. The first block with a hash stays the one that is found."""
        if self._hashes[block] is None and block_hash not in self._by_hash:
            self._hashes[block] = block_hash
            self._by_hash[block_hash] = block

    def _forget(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._by_hash[block_hash]
            self._hashes[block] = None

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Account for every block, given what each live request holds.

        Raises:
            RuntimeError: a block is lost, free while held, or held by nobody while not free.
        """
        held = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                held[block] += 1
        if held[0] or 0 in self._free:
            raise RuntimeError("block 0 was given out")
        for block in range(1, self.num_blocks):
            if held[block] != self._references[block]:
                raise RuntimeError(f"block {block}: {held[block]} holders, {self._references[block]} references")
            if (held[block] == 0) != (block in self._free):
                raise RuntimeError(f"block {block}: {held[block]} holders, free list says {block in self._free}")
        for block_hash, block in self._by_hash.items():
            if self._hashes[block] != block_hash:
                raise RuntimeError(f"block {block}: its hash and the index disagree")
