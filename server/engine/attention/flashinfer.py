"""Paged attention by FlashInfer's kernels (Ye et al. 2025, arXiv 2501.01005).

The package is imported when the backend is built. It compiles its kernels when they are first needed, one to two
minutes, and keeps them under `FLASHINFER_WORKSPACE_BASE`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from server.engine.attention.base import AttentionNeed, KernelPages, StepMetadata, Unsupported
from server.engine.attention.paged_cache import PagedCache, page_bytes
from server.engine.attention.torch import TorchAttention, TorchPlan

HEAD_DIMS = (64, 128, 256)
GROUPS = (1, 2, 3, 4, 6, 8)
CAPABILITY = (8, 0)
WORKSPACE = 128 << 20
"""Bytes; what the package recommends for the partial results of split keys."""


@dataclass(frozen=True)
class PageLists:
    """The rows of a step as the wrappers want them, all on the host: planning asks the device for nothing."""

    query_start: Tensor
    """int32 [R + 1]."""
    page_start: Tensor
    """int32 [R + 1], into `places`."""
    places: Tensor
    """int64 [P], where each row's pages stand in the flattened block tables, row after row."""
    last_page_len: Tensor
    """int32 [R], tokens in each row's last page, 1 to page_size."""

    @property
    def decodes(self) -> bool:
        """Whether every row brings one token."""
        return int(self.query_start[-1]) == len(self.last_page_len)


def page_lists(query_start: Sequence[int], seq_lens: Sequence[int], table_width: int, page_size: int) -> PageLists:
    """Which pages hold each row.

    Args:
        query_start: [R + 1], as in `StepMetadata`.
        seq_lens: [R], all above 0.
        table_width: columns of the block tables.
        page_size: tokens a page.
    """
    pages = [-(-length // page_size) for length in seq_lens]
    starts = [0]
    for count in pages:
        starts.append(starts[-1] + count)
    places = [torch.arange(count) + row * table_width for row, count in enumerate(pages)]
    return PageLists(
        query_start=torch.tensor(query_start, dtype=torch.int32),
        page_start=torch.tensor(starts, dtype=torch.int32),
        places=torch.cat(places),
        last_page_len=torch.tensor([(length - 1) % page_size + 1 for length in seq_lens], dtype=torch.int32),
    )


@dataclass(frozen=True)
class FlashInferPlan:
    """One step: the wrapper that was planned for it."""

    wrapper: Any
    slots: Tensor


class FlashInferAttention:
    """Decode and prefill wrappers over one paged cache, planned once a step for all layers."""

    name: ClassVar[str] = "flashinfer"
    kernel_pages: ClassVar[KernelPages] = KernelPages(sizes=frozenset({16, 32, 64}))
    kv_layout: ClassVar[str] = "NHD"

    @classmethod
    def supports(cls, need: AttentionNeed) -> Unsupported | None:
        """Half-precision heads of the sizes that its kernels are written for, on CUDA from sm_80 on."""
        problem = cls._shape_problem(need) or _package_problem(need.device)
        return None if problem is None else Unsupported(problem)

    @classmethod
    def _shape_problem(cls, need: AttentionNeed) -> str | None:
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} KV heads"
        if need.head_dim not in HEAD_DIMS:
            return f"head dimension {need.head_dim} (it takes {', '.join(map(str, HEAD_DIMS))})"
        group = need.num_heads // need.num_kv_heads
        if group not in GROUPS:
            return f"{group} query heads a KV head (it takes {', '.join(map(str, GROUPS))})"
        if need.dtype not in (torch.float16, torch.bfloat16):
            return f"queries of dtype {need.dtype} (it takes float16 and bfloat16)"
        if need.kv_dtype not in (need.dtype, torch.float8_e4m3fn):
            return f"KV cache of dtype {need.kv_dtype} (it stores the model's dtype or fp8)"
        return None

    def __init__(self, need: AttentionNeed, num_layers: int) -> None:
        self.need = need
        self.num_layers = num_layers
        self.cache: PagedCache | None = None
        # Before there is a cache, a step is its own context: nothing is paged, and the reference computes it.
        self._unpaged = TorchAttention(need, num_layers)
        self._decode, self._prefill = _wrappers(need)
        self._planned: torch.cuda.Event | None = None

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page over all layers, keys and values."""
        return page_bytes(self.need, self.num_layers, page_size)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Make the KV cache of all layers."""
        self.cache = PagedCache(self.need, self.num_layers, num_pages, page_size)

    def copy_pages(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages in all layers; see `AttentionBackend.copy_pages`."""
        if self.cache is not None:
            self.cache.copy_pages(sources, targets)

    def plan(self, step: StepMetadata) -> FlashInferPlan | TorchPlan:
        """Plan the wrapper that suits the step."""
        if self.cache is None:
            return self._unpaged.plan(step)
        need, page_size = self.need, self.cache.page_size
        lists = page_lists(step.query_start, step.seq_lens, step.block_tables.shape[1], page_size)
        places = lists.places.to(need.device, non_blocking=True)
        pages = step.block_tables.flatten()[places].to(torch.int32)
        if self._planned is not None:
            # A plan is built in one pinned buffer: the last one must have left it.
            self._planned.synchronize()
        options = {
            "q_data_type": need.dtype,
            "kv_data_type": need.kv_dtype,
            "sm_scale": 1 / math.sqrt(need.head_dim),
        }
        shape = (need.num_heads, need.num_kv_heads, need.head_dim)
        if lists.decodes:
            wrapper = self._decode
            wrapper.plan(lists.page_start, pages, lists.last_page_len, *shape, page_size, **options)
        else:
            wrapper = self._prefill
            wrapper.plan(
                lists.query_start,
                lists.page_start,
                pages,
                lists.last_page_len,
                *shape,
                page_size,
                causal=True,  # aligned to the rows' ends
                **options,
            )
        self._planned = torch.cuda.Event()
        self._planned.record(torch.cuda.current_stream(need.device))
        return FlashInferPlan(wrapper, step.slot_mapping)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layer_id: int, plan: FlashInferPlan | TorchPlan) -> Tensor:
        """Store k and v, then attend; see `AttentionBackend.forward`."""
        if isinstance(plan, TorchPlan):
            return self._unpaged.forward(q, k, v, layer_id, plan)
        assert self.cache is not None
        self.cache.store(layer_id, k, v, plan.slots)
        pages = (self.cache.keys[layer_id], self.cache.values[layer_id])
        out: Tensor = plan.wrapper.run(q.contiguous(), pages)
        return out.flatten(1)


def _wrappers(need: AttentionNeed) -> tuple[Any, Any]:
    """For decodes and for longer rows; they share a workspace, since one step runs after the other."""
    import flashinfer

    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=need.device)
    # Grouped heads keep tensor cores busy even at one query a row.
    grouped = need.num_heads > need.num_kv_heads
    decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped, backend="fa2")
    return decode, flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")


def _package_problem(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "the flashinfer backend needs CUDA"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    if importlib.util.find_spec("flashinfer_jit_cache") is None and not _has_compiler():
        return "flashinfer compiles its kernels with nvcc, which is neither on PATH nor under CUDA_HOME"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} (it needs {CAPABILITY[0]}.{CAPABILITY[1]})"
    return None


def _has_compiler() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return shutil.which("nvcc") is not None or os.access(os.path.join(home, "bin", "nvcc"), os.X_OK)
