"""The least time that a step can take: the bytes it must read, over what the memory delivers."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.moe import Experts
from server.engine.models.eagle3 import Eagle3Draft


@dataclass(frozen=True)
class ModelBytes:
    """What a forward pass of one model reads."""

    dense: int
    """Weights that every pass reads: all but the experts, and of the embedding none."""
    experts: int
    """All experts of all layers."""
    num_experts: int
    top_k: int
    kv_per_token: float
    """Keys and values of one token over all layers."""
    first_pass_only: int = 0
    """The part of `dense` that only the first of a draft's passes reads."""

    def weights(self, tokens: int) -> float:
        """Bytes of weights that a pass over so many tokens reads, when the router spreads them evenly."""
        if not self.num_experts:
            return float(self.dense)
        hit = 1 - (1 - self.top_k / self.num_experts) ** tokens
        return self.dense + self.experts * hit


def model_bytes(model: nn.Module, kv_per_token: float) -> ModelBytes:
    """Count what a loaded model's layers hold."""
    seen: set[int] = set()
    dense = experts = num_experts = top_k = 0
    for module in model.modules():
        if isinstance(module, Experts):
            experts += _bytes(vars(module), seen)
            num_experts, top_k = module.backend.need.num_experts, module.backend.need.top_k
        elif not isinstance(module, VocabEmbedding):
            own = {name: value for name, value in vars(module).items() if name not in ("_modules", "_buffers")}
            dense += _bytes(own, seen)
    first = 0
    if isinstance(model, Eagle3Draft) and model.fc is not None:
        first = _bytes(vars(model.fc), set())
    return ModelBytes(dense, experts, num_experts, top_k, kv_per_token, first)


def step_bytes(target: ModelBytes, draft: ModelBytes | None, rows: int, drafted: int, context: float) -> float:
    """Bytes of one step: the target's pass over 1 + `drafted` tokens a row, and the draft's passes.

    Args:
        target: the target model's.
        draft: the draft model's, which makes one pass per drafted token; None without one.
        rows: sequences.
        drafted: tokens a row that are verified.
        context: tokens a row in the cache.
    """
    total = target.weights(rows * (1 + drafted)) + rows * context * target.kv_per_token
    if draft is not None and drafted:
        total += draft.weights(rows * (1 + drafted)) + rows * context * draft.kv_per_token
        later = draft.weights(rows) - draft.first_pass_only + rows * context * draft.kv_per_token
        total += (drafted - 1) * later
    return total


def measure_bandwidth(device: torch.device, repeats: int = 10) -> float:
    """Bytes per second that a large copy reads and writes, the best of several."""
    size = (2 << 30) if device.type == "cuda" else (128 << 20)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        _wait(device)
        best = min(best, (time.perf_counter() - started) / 4)
    return 2 * size / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _bytes(value: Any, seen: set[int]) -> int:
    total = 0
    for tensor in _tensors(value):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            total += tensor.numel() * tensor.element_size()
    return total


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))
