"""How many blocks the KV cache gets: as asked, or from what memory is really free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from server.errors import UserError

CPU_SHARE = 0.5
CPU_BYTES = 4 << 30
"""Unless told otherwise, no more than this: on a laptop the server is not alone."""
CUDA_SHARE = 0.9


@dataclass(frozen=True)
class KVBudget:
    """What the user said about the cache's size; at most one of the first two."""

    num_blocks: int | None
    memory_bytes: int | None
    utilization: float | None
    """Share of the device's memory that the server may use (CUDA), or of the free memory that the cache may (CPU)."""


def free_cpu_bytes() -> int:
    """Memory that can be had now, within the container's limit where there is one (cgroup v2)."""
    free = psutil.virtual_memory().available
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists():
        text = limit.read_text().strip()
        if text.isdigit():
            free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def num_kv_blocks(
    budget: KVBudget,
    device: torch.device,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    reserved: int = 0,
) -> int:
    """Blocks to allocate, the one that stays unused included.

    Call it with the model loaded and, on CUDA, after a forward of the largest step, so that its peak is known.
    `reserved` bytes of the device stay free for what is allocated later.

    Raises:
        UserError: not even one sequence of a few blocks fits.
    """
    if budget.num_blocks is not None:
        return budget.num_blocks + 1
    if budget.memory_bytes is not None:
        room, origin = budget.memory_bytes, "--kv-cache-memory"
    elif device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        share = budget.utilization or CUDA_SHARE
        # What the largest step took beyond the weights has been freed to torch's pool, and is needed again.
        working = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room, origin = (
            int(total * share) - (total - free) + held - working - reserved,
            f"--gpu-memory-utilization {share}",
        )
    else:
        share = budget.utilization or CPU_SHARE
        room, origin = int(free_cpu_bytes() * share), f"--gpu-memory-utilization {share} of the free memory"
        if budget.utilization is None:
            room = min(room, CPU_BYTES)
    blocks = room // block_bytes
    if blocks < 2:
        raise UserError(
            f"The KV cache finds no room: {origin} leaves {max(room, 0) / 2**20:.0f} MiB, and one block of "
            f"{block_size} tokens takes {block_bytes / 2**20:.2f} MiB. Give it more with --kv-cache-memory."
        )
    # More than all sequences at full length can never be used.
    return int(min(blocks, max_num_seqs * -(-max_model_len // block_size) + 1))
