"""How many threads compute, and on which cores."""

from __future__ import annotations

import os

import torch

LEAST_TO_SHARE = 4
"""From so many cores on, one is left to the API process, whose work would otherwise hold up a thread of every step."""


def set_threads(asked: int | None) -> int:
    """Set the number of threads that torch and the C products use in this process; OMP_NUM_THREADS counts, too.

    Args:
        asked: by the user; None to choose.

    Returns:
        The number.
    """
    count = asked
    if count is None:
        count = torch.get_num_threads()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if "OMP_NUM_THREADS" not in os.environ and cores >= LEAST_TO_SHARE:
            count = min(count, cores - 1)
    if count != torch.get_num_threads():
        torch.set_num_threads(count)
    return count
