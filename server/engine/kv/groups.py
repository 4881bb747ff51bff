"""KV groups: layers of equal geometry, over target and draft, and the one page size that all their kernels read.

Block tables, slots, and every attention plan take the page size from here; nobody else has a say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from server.engine.attention.base import AttentionBackend, AttentionNeed
from server.errors import UserError

SMALLEST_PAGE = 16


@dataclass(frozen=True)
class Pages:
    """How a KV group is cut. Everyone who reads the cache reads it from here."""

    block_size: int
    """Tokens that are given out and shared together."""
    page_size: int
    """Tokens that the kernels address together; a divisor of the block size."""

    @property
    def per_block(self) -> int:
        """Kernel pages a block."""
        return self.block_size // self.page_size


@dataclass(frozen=True)
class GroupMember:
    """The attention layers of one model."""

    role: str
    need: AttentionNeed
    backend: type[AttentionBackend]
    num_layers: int

    @property
    def geometry(self) -> tuple[object, ...]:
        """What layers must share to be one group."""
        need = self.need
        return (need.num_kv_heads, need.head_dim, need.kv_dtype, need.device)


@dataclass(frozen=True)
class KVGroupPlan:
    """One group."""

    pages: Pages
    members: tuple[GroupMember, ...]


def common_page(block_size: int, backends: Sequence[type[AttentionBackend]]) -> int | None:
    """The largest page that divides the block and that all backends can read, or None."""
    sizes = (size for size in range(block_size, SMALLEST_PAGE - 1, -SMALLEST_PAGE) if block_size % size == 0)
    return next((size for size in sizes if all(backend.kernel_pages.accepts(size) for backend in backends)), None)


def group_layers(members: Sequence[GroupMember], block_size: int) -> list[KVGroupPlan]:
    """Form the groups and vote on their pages.

    Raises:
        UserError: the backends of a group share no layout, or no page that divides the block.
    """
    groups: dict[tuple[object, ...], list[GroupMember]] = {}
    for member in members:
        groups.setdefault(member.geometry, []).append(member)
    plans = []
    for together in groups.values():
        backends = [member.backend for member in together]
        page = common_page(block_size, backends)
        layouts = {backend.kv_layout for backend in backends}
        if page is None or len(layouts) > 1:
            sides = "; ".join(
                f"{member.role}: {member.backend.name} reads layout {member.backend.kv_layout} in pages of "
                f"{member.backend.kernel_pages} tokens"
                for member in together
            )
            raise UserError(
                f"the KV cache cannot be shared: no common layout and page within --block-size {block_size} ({sides})"
            )
        plans.append(KVGroupPlan(Pages(block_size, page), tuple(together)))
    return plans
