"""What an attention backend is: one instance per model and KV group, planned once per step, run once per layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Unsupported:
    """Why a backend cannot serve a need; the reason goes to the user as it is."""

    reason: str


@dataclass(frozen=True)
class AttentionNeed:
    """What a group of equal attention layers asks of its backend."""

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class KernelPages:
    """Page sizes that a backend's kernels can read: any multiple of `multiple_of`, or just the `sizes`."""

    multiple_of: int = 0
    sizes: frozenset[int] = frozenset()

    def accepts(self, page_size: int) -> bool:
        """Whether the kernels can read pages of this many tokens."""
        return page_size in self.sizes or bool(self.multiple_of and page_size % self.multiple_of == 0)

    def __str__(self) -> str:
        return f"any multiple of {self.multiple_of}" if self.multiple_of else ", ".join(map(str, sorted(self.sizes)))


@dataclass(frozen=True)
class StepMetadata:
    """The rows of one step: row r brings the query tokens `query_start[r]` to `query_start[r + 1]`.

    Host lists and device tensors of the same facts, so that no backend has to synchronise to learn a size.
    """

    query_start: list[int]
    """[R + 1], into the step's T tokens."""
    seq_lens: list[int]
    """[R], tokens of each row in the cache after this step: its context and its new tokens."""
    block_tables: Tensor
    """int64 [R, max_blocks], kernel pages of each row; padded with 0."""
    slot_mapping: Tensor
    """int64 [T], where each new token's key and value go: page * page_size + offset."""


@dataclass(frozen=True)
class UniformStep:
    """A step whose rows all bring as many new tokens: decode, or verification of k drafts.

    All that changes from step to step lies in device memory, so that a captured graph finds it there when it is
    replayed.
    """

    query_len: int
    """New tokens of every row: row r brings the tokens r * query_len to (r + 1) * query_len."""
    longest: int
    """No row will ever have more tokens than this."""
    seq_lens: Tensor
    """int32 [R], as in `StepMetadata`; 0 for a row of padding, whose output is 0."""
    block_tables: Tensor
    """int64 [R, W], as in `StepMetadata`."""
    slot_mapping: Tensor
    """int64 [R * query_len], as in `StepMetadata`; -1 for a token that is not stored."""


class AttentionBackend(Protocol):
    """Paged attention over variable-length rows."""

    name: ClassVar[str]
    kernel_pages: ClassVar[KernelPages]
    kv_layout: ClassVar[str]
    """Order of a page's dimensions: "NHD" is [page_size, kv_heads, head_dim]. A KV group has one."""
    need: AttentionNeed
    """What the instance was built for."""

    @classmethod
    def supports(cls, need: AttentionNeed) -> Unsupported | None:
        """None when the backend can serve the need, else the reason."""

    def __init__(self, need: AttentionNeed, num_layers: int) -> None: ...

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Make the KV cache of all layers; without it (before sizing) attention sees only the step's own tokens."""

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages (int64 [N] each) in all layers; all are read before any is written."""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers, keys and values."""

    def plan(self, step: StepMetadata) -> Any:
        """Whatever the layers of this step share; passed back to `forward`."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, plan: Any) -> Tensor:
        """Store k and v, then attend causally.

        Args:
            q: [T, num_heads, head_dim], rotated.
            k: [T, num_kv_heads, head_dim], rotated.
            v: [T, num_kv_heads, head_dim].
            layer_id: index into this backend's layers.
            plan: what `plan` returned for this step.

        Returns:
            [T, num_heads * head_dim].
        """


@runtime_checkable
class CapturableAttention(Protocol):
    """A backend whose uniform steps can be captured in a CUDA graph."""

    def longest_query(self) -> int:
        """The most new tokens a row of a uniform step may have."""

    def plan_uniform(self, step: UniformStep) -> Any:
        """A plan for `forward` that reads the step's tensors when the kernels run; valid as long as they are.

        Raises:
            ValueError: more new tokens a row than `longest_query`, or there is no cache yet.
        """


@runtime_checkable
class RotatingAttention(Protocol):
    """A backend that takes the projections as they are: head norms, rotation and storing are one kernel of its own."""

    def forward_qkv(
        self,
        qkv: Tensor,
        head_norms: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        layer_id: int,
        plan: Any,
    ) -> Tensor:
        """Normalise and rotate queries and keys, store keys and values, then attend causally.

        Args:
            qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], queries first, then keys and values.
            head_norms: [2, head_dim], weights of the RMS norms of query and key heads; None when there are none.
            eps: of these norms.
            cos: [T, 1, rotary_dim] as in `layers.rope.Angles`.
            sin: the same.
            layer_id: index into this backend's layers.
            plan: of this step.

        Returns:
            [T, num_heads * head_dim].
        """
