"""Drives a model through the paged reference attention, step by step, as the engine would."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from server.engine.attention.base import AttentionNeed, StepMetadata
from server.engine.attention.torch import TorchAttention
from server.engine.layers.context import BuildContext
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM, build_model
from server.engine.parallel import ParallelGroup
from server.engine.quantization.formats import Formats

BLOCK = 16
torch.set_num_threads(1)  # the models are tiny: more threads only wait for each other


@dataclass
class Paged:
    """A model, its cache, and rows that grow."""

    model: CausalLM
    attention: TorchAttention
    num_pages: int
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def _grow(self, row: str, length: int) -> list[int]:
        table = self.tables.setdefault(row, [])
        used = {page for pages in self.tables.values() for page in pages}
        # From the end, so that neighbours in a row are not neighbours in memory; page 0 stays the padding.
        free = [page for page in reversed(range(1, self.num_pages)) if page not in used]
        while len(table) * BLOCK < length:
            table.append(free.pop(0 if len(table) % 2 else -1))
        return table

    def step(self, new_tokens: dict[str, list[int]]) -> dict[str, Tensor]:
        """Run one step over rows in the given order; returns the logits of every new token, fp32 [n, V]."""
        starts, lens, slots, ids, positions, tables = [0], [], [], [], [], []
        for row, tokens in new_tokens.items():
            done = self.lengths.get(row, 0)
            length = done + len(tokens)
            table = self._grow(row, length)
            tables.append(table)
            slots += [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(done, length)]
            positions += range(done, length)
            ids += tokens
            starts.append(starts[-1] + len(tokens))
            lens.append(length)
            self.lengths[row] = length
        width = max(map(len, tables))
        block_tables = torch.tensor([table + [0] * (width - len(table)) for table in tables])
        step = StepMetadata(starts, lens, block_tables, torch.tensor(slots))
        hidden = self.model(torch.tensor(ids), torch.tensor(positions), self.attention.plan(step)).final
        logits = self.model.logits(hidden).float()
        return {row: logits[starts[i] : starts[i + 1]] for i, row in enumerate(new_tokens)}


def build(
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    moe: str = "torch",
    num_pages: int = 16,
    formats: Formats | None = None,
) -> Paged:
    """The model with uninitialised weights, and its cache."""
    device = torch.device("cpu")
    need = AttentionNeed(device, dtype, dtype, config.num_heads, config.num_kv_heads, config.head_dim)
    attention = TorchAttention(need, config.num_layers)
    attention.allocate(num_pages, BLOCK)
    context = BuildContext(dtype, device, attention, moe, ParallelGroup(), formats or Formats())
    model = build_model(config, context)
    return Paged(model, attention, num_pages)


def fill(model: CausalLM, tensors: dict[str, Tensor]) -> None:
    """Copy a checkpoint's tensors, as strictly as the loader does."""
    targets = model.weight_targets()
    extra = {name for name in tensors if name not in targets and not model.ignored_weight(name)}
    assert not extra, f"left over: {sorted(extra)}"
    assert not targets.keys() - tensors.keys(), f"missing: {sorted(targets.keys() - tensors.keys())}"
    for name, target in targets.items():
        assert target.shape == tensors[name].shape, (name, target.shape, tensors[name].shape)
        target.copy_(tensors[name])
    model.finish_loading()


def prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocab_size, (length,), generator=generator).tolist()
    return ids


def mixed_run(paged: Paged, sequences: dict[str, list[int]]) -> dict[str, Tensor]:
    """Logits of three sequences that share steps: whole prefill, chunks, and token by token, in changing order."""
    got: dict[str, list[Tensor]] = {name: [] for name in sequences}
    a, b, c = sequences.values()
    schedule: list[dict[str, list[int]]] = [{"a": a[:-6]}, {"b": b[:7], "a": a[-6:-5]}, {"a": a[-5:-4], "c": c[:1]}]
    schedule += [{"b": b[7:18], "c": c[1:17], "a": a[-4:-3]}, {"c": c[17:18], "a": a[-3:-2], "b": b[18:19]}]
    schedule += [{"a": a[-2:-1]}, {"a": a[-1:], "c": c[18:], "b": b[19:]}]
    for step in schedule:
        for name, logits in paged.step(step).items():
            got[name].append(logits)
    return {name: torch.cat(parts) for name, parts in got.items()}


Config = dict[str, Any]


def close(got: Tensor, expected: Tensor) -> float:
    """Greatest absolute difference; both must be finite."""
    assert got.shape == expected.shape
    difference = float((got - expected).abs().max())
    assert math.isfinite(difference)
    return difference
