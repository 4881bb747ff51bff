"""CUDA graphs: work of fixed shapes over memory at fixed addresses, recorded once and replayed with one call.

Eagerly, a decode step is some five hundred launches of a few microseconds each; replayed, it is one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    result: Any


class Graphs:
    """Captured pieces of work by key. They share one memory pool, since they never run at once.

    What a piece returns keeps its address: the next replay of the same key writes it again. Everything else that it
    allocates is used again by other pieces.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        """Make an empty set.

        Args:
            device: where the work runs.
            enabled: whether to capture; if not, every piece runs as it is.
        """
        self.enabled = enabled and device.type == "cuda"
        self._captured: dict[Hashable, _Captured] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        """Do a piece of work; under a key seen before, replay what was captured then and return what it returned.

        Args:
            key: names the work and its shapes.
            work: does it. The first time it runs twice, so running it again over the same memory must do no harm.
        """
        if not self.enabled:
            return work()
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(work)
        captured.graph.replay()
        result: T = captured.result
        return result

    def _capture(self, work: Callable[[], Any]) -> _Captured:
        if self._stream is None:
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # torch.cuda.graph() would collect garbage and empty the allocator's cache for each graph: seconds in all.
        collecting = gc.isenabled()
        gc.disable()
        try:
            with torch.cuda.stream(self._stream):
                work()  # compiles kernels and makes workspaces, which capturing forbids
                self._stream.synchronize()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = work()
                finally:
                    graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        torch.cuda.synchronize()
        return _Captured(graph, result)


def graph_sizes(most: int) -> list[int]:
    """Numbers of rows that are captured, the largest first: a step is padded to the next one."""
    sizes = {1, 2, 4, most}
    step = 8
    while step <= most:
        sizes |= set(range(step, min(most, 4 * step) + 1, step))
        step *= 2
    return sorted((size for size in sizes if size <= most), reverse=True)
