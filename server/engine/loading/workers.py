"""Independent tensor work spread over threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def run_in_order(work: Callable[[T], None], items: Sequence[T]) -> Iterator[T]:
    """Call `work` on every item, on as many threads as torch may use, and yield the items in order as they are done.

    Each call computes on one thread: operations that split themselves up wait for one another at every step, which on a
    busy machine made loading ten times slower. The first error stops the rest and is raised here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="load") as pool:
            for item, _ in zip(items, pool.map(torch.no_grad()(work), items), strict=True):
                yield item
    finally:
        torch.set_num_threads(threads)
