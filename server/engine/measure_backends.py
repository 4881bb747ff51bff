"""Times attention and MoE backends on the layers of one shape, side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct
from torch import Tensor

from server.engine.attention.base import AttentionBackend, AttentionNeed, CapturableAttention, UniformStep
from server.engine.attention.registry import attention_backend
from server.engine.attention.registry import verdicts as attention_verdicts
from server.engine.batch import Span, make_batch
from server.engine.floor import measure_bandwidth
from server.engine.graphs import Graphs
from server.engine.models.config import ModelConfig
from server.engine.moe.base import ExpertWeights, MoENeed
from server.engine.moe.registry import moe_backend
from server.engine.moe.registry import verdicts as moe_verdicts

REPEATS = 5
PAGE = 64
COPIES = 4
"""Layers with weights and caches of their own that are run in turn, so that none is found in the processor's cache."""


class BackendFigure(Struct, frozen=True):
    """One backend at one size."""

    component: str
    """attention or moe."""
    backend: str
    work: str
    """What was computed, such as "decode 8 x 512"."""
    milliseconds: float | None
    """Of one layer; None when the backend cannot serve."""
    gigabytes_per_second: float | None
    """That it must read: keys and values, or the experts that were hit."""
    why_not: str = ""


@dataclass(frozen=True)
class _Work:
    name: str
    run: Callable[[], object]
    bytes: float


class BackendBench:
    """All backends of this build on one shape."""

    def __init__(
        self, config: ModelConfig, device: torch.device, dtype: torch.dtype, batches: Sequence[int], context: int
    ) -> None:
        """Measure the memory's bandwidth.

        Args:
            config: the shape.
            device: where to run.
            dtype: of weights, activations and cache.
            batches: sequences that decode together.
            context: tokens of each in the cache.
        """
        self.config, self.device, self.dtype = config, device, dtype
        self.batches, self.context = batches, context
        self.bandwidth = measure_bandwidth(device)
        """Bytes per second of a copy."""
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"

    @torch.inference_mode()
    def run(self) -> Iterator[BackendFigure]:
        """One backend after the other, at every batch size; those that cannot serve once, with the reason."""
        config = self.config
        need = AttentionNeed(
            self.device, self.dtype, self.dtype, config.num_heads, config.num_kv_heads, config.head_dim
        )
        for name, problem in attention_verdicts(need).items():
            if problem is not None:
                yield BackendFigure("attention", name, "", None, None, problem.reason)
                continue
            for batch in self.batches:
                yield self._figure("attention", name, self._attention(attention_backend(name), need, batch))
        if config.moe is None:
            return
        moe = config.moe
        moe_need = MoENeed(
            self.device, self.dtype, moe.num_experts, moe.top_k, config.hidden_size, moe.intermediate_size
        )
        layers = [self._experts(moe_need) for _ in range(COPIES)]
        for name, problem in moe_verdicts([moe_need]).items():
            if problem is not None:
                yield BackendFigure("moe", name, "", None, None, problem.reason)
                continue
            for batch in self.batches:
                yield self._figure("moe", name, self._moe(name, moe_need, layers, batch))

    def _figure(self, component: str, name: str, work: _Work) -> BackendFigure:
        captures = component == "moe" and moe_backend(name).capturable
        captures |= component == "attention" and issubclass(attention_backend(name), CapturableAttention)
        graphs = Graphs(self.device, enabled=captures)
        best = float("inf")
        graphs.run(work.name, work.run)
        # A single run on a GPU is no longer than starting it and waiting for it.
        runs = 20 if self.device.type == "cuda" else 1
        for _ in range(REPEATS):
            self._wait()
            started = time.perf_counter()
            for _ in range(runs):
                graphs.run(work.name, work.run)
            self._wait()
            best = min(best, (time.perf_counter() - started) / runs / COPIES)
        return BackendFigure(component, name, work.name, 1000 * best, work.bytes / best / 1e9)

    def _attention(self, backend: type[AttentionBackend], need: AttentionNeed, batch: int) -> _Work:
        attention = backend(need, COPIES)
        pages = -(-self.context // PAGE)
        attention.allocate(batch * pages, PAGE)
        order = torch.randperm(batch * pages).view(batch, pages).tolist()
        spans = [Span(own, self.context - 1, [0]) for own in order]
        step = make_batch(spans, PAGE, PAGE, self.device).step
        if isinstance(attention, CapturableAttention):
            lengths = torch.full((batch,), self.context, dtype=torch.int32, device=self.device)
            plan = attention.plan_uniform(UniformStep(1, self.context, lengths, step.block_tables, step.slot_mapping))
        else:
            plan = attention.plan(step)
        q = self._noise(batch, need.num_heads, need.head_dim)
        k, v = self._noise(2, batch, need.num_kv_heads, need.head_dim)
        read = 2 * batch * self.context * need.num_kv_heads * need.head_dim * need.kv_dtype.itemsize
        return _Work(
            f"decode {batch} x {self.context}",
            lambda: [attention.forward(q, k, v, layer, plan) for layer in range(COPIES)],
            read,
        )

    def _moe(self, name: str, need: MoENeed, layers: list[ExpertWeights], batch: int) -> _Work:
        backend = moe_backend(name)(need)
        packed = [backend.pack(layer) for layer in layers]
        x = self._noise(batch, need.hidden_size)
        ids = torch.rand(batch, need.num_experts, device=self.device).argsort(-1)[:, : need.top_k].contiguous()
        weights = torch.full((batch, need.top_k), 1 / need.top_k, dtype=self.dtype, device=self.device)
        hit = len(ids.unique())
        read = hit * 3 * need.hidden_size * need.intermediate_size * need.dtype.itemsize
        return _Work(
            f"{batch} tokens", lambda: [backend.forward(x, layer, ids, weights) for layer in packed], float(read)
        )

    def _experts(self, need: MoENeed) -> ExpertWeights:
        count, hidden, width = need.num_experts, need.hidden_size, need.intermediate_size
        return ExpertWeights(self._noise(count, 2 * width, hidden), self._noise(count, hidden, width))

    def _noise(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device).normal_(0, 0.05)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def bench_backends(shape: Mapping[str, object], batches: Sequence[int], context: int) -> BackendBench:
    """A bench of a config.json's layers, on CUDA if there is one, in the dtype that it names."""
    config = ModelConfig.from_hf(shape)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return BackendBench(config, device, torch.bfloat16, batches, context)
