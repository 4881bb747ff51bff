"""All decoder layers of a dense model, or of an EAGLE-3 head, as one call: nothing of Python between its products."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from server.engine.attention.base import StepMetadata
from server.engine.attention.paged_cache import PagedCache
from server.engine.cpu.library import CLayer, CStack, CStep, CWeight, load_library
from server.engine.cpu.weights import BLOCK, PackedWeight


@dataclass(frozen=True)
class LayerParts:
    """What one layer computes with."""

    input_norm: Tensor
    post_norm: Tensor
    head_norms: Tensor | None
    """[2, head_dim], of queries and keys."""
    qkv: PackedWeight
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight

    @property
    def weights(self) -> tuple[PackedWeight, ...]:
        """All products."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True)
class StackParts:
    """What the whole model computes with, the head left out."""

    layers: Sequence[LayerParts]
    embedding: Tensor
    """bfloat16 [vocabulary, hidden]."""
    final_norm: Tensor
    inverse_frequency: Tensor
    """float32 [rotary_dim / 2]."""
    angle_scale: float
    """Multiplies cosines and sines."""
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    embedding_norm: Tensor | None
    """[hidden], where the first layer reads the embedding's norm beside that of given hidden states (EAGLE-3)."""
    begins_normed: bool
    """Whether the residual stream begins with the norm of these hidden states."""
    capture: Sequence[int]
    """Layer boundaries whose residual stream is kept; they rise."""


def stack_problem(parts: StackParts, kv_dtype: torch.dtype) -> str | None:
    """Why the layers cannot be computed as one call; None when they can."""
    hidden, intermediate = parts.embedding.shape[1], parts.layers[0].down.columns
    if kv_dtype is not torch.bfloat16 or parts.embedding.dtype is not torch.bfloat16:
        return "it reads a bfloat16 embedding and cache"
    for what, size in (("hidden size", hidden), ("width of the MLP", intermediate), ("head size", parts.head_dim)):
        if size % BLOCK:
            return f"{what} {size} (it takes multiples of {BLOCK})"
    return None


class DecoderStack:
    """The layers of one model; it stays valid as long as the packed weights do, which it holds."""

    def __init__(self, parts: StackParts) -> None:
        self._parts = parts
        self._library = load_library()
        self._floats: list[Tensor] = []
        layers = (CLayer * len(parts.layers))()
        for entry, layer in zip(layers, parts.layers, strict=True):
            entry.input_norm, entry.post_norm = self._keep(layer.input_norm), self._keep(layer.post_norm)
            if layer.head_norms is not None:
                entry.query_norm, entry.key_norm = self._keep(layer.head_norms[0]), self._keep(layer.head_norms[1])
            for name in ("qkv", "output", "gate_up", "down"):
                weight: PackedWeight = getattr(layer, name)
                ctypes.memmove(
                    ctypes.byref(getattr(entry, name)), ctypes.byref(weight.described), ctypes.sizeof(CWeight)
                )
        bits = {weight.bits for layer in parts.layers for weight in layer.weights}
        places = np.full(len(parts.layers) + 1, -1, np.int64)
        places[list(parts.capture)] = np.arange(len(parts.capture))
        self._layers, self._places = layers, places
        self._stack = CStack(
            layers=layers,
            embedding=parts.embedding.data_ptr(),
            embedding_norm=None if parts.embedding_norm is None else self._keep(parts.embedding_norm),
            final_norm=self._keep(parts.final_norm),
            inverse_frequency=self._keep(parts.inverse_frequency),
            captured=places.ctypes.data,
            num_layers=len(parts.layers),
            hidden=parts.embedding.shape[1],
            intermediate=parts.layers[0].down.columns,
            heads=parts.num_heads,
            kv_heads=parts.num_kv_heads,
            head_dim=parts.head_dim,
            rotary_dim=2 * len(parts.inverse_frequency),
            captures=len(parts.capture),
            quantized=int(bits != {16}),
            plain=int(16 in bits),
            begins_normed=int(parts.begins_normed),
            eps=parts.eps,
            angle_scale=parts.angle_scale,
        )
        self._cache: PagedCache | None = None
        self._room = torch.empty(0, dtype=torch.uint8)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        step: StepMetadata,
        cache: PagedCache,
        states: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run one step and store its keys and values.

        Args:
            input_ids: int64 [T].
            positions: int64 [T].
            step: the rows.
            cache: bfloat16, of these layers.
            states: bfloat16 [T, hidden], contiguous, the residual stream that a head begins with; None for a model.

        Returns:
            bfloat16 [T, hidden] after the final norm, and the captured boundaries [T, n * hidden] or None.
        """
        if cache is not self._cache:
            self._take(cache)
        count, threads, hidden = len(input_ids), torch.get_num_threads(), self._stack.hidden
        out = torch.empty(count, hidden, dtype=torch.bfloat16)
        captures = self._stack.captures
        aux = torch.empty(count, captures * hidden, dtype=torch.bfloat16) if captures else None
        starts = np.array(step.query_start, np.int64)
        tables = step.block_tables
        described = CStep(
            tokens=count,
            sequences=len(step.seq_lens),
            table_width=tables.shape[1],
            ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            slots=step.slot_mapping.data_ptr(),
            query_start=starts.ctypes.data,
            tables=tables.data_ptr(),
            states=None if states is None else states.data_ptr(),
            hidden=out.data_ptr(),
            captured=None if aux is None else aux.data_ptr(),
        )
        needed = self._library.stack_room(self._stack, described, threads)
        if len(self._room) < needed:
            self._room = torch.empty(needed, dtype=torch.uint8)
        self._library.stack(self._stack, described, self._room.data_ptr(), threads)
        return out, aux

    def _take(self, cache: PagedCache) -> None:
        for entry, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            entry.keys, entry.values = keys.data_ptr(), values.data_ptr()
        self._stack.page_size = cache.page_size
        self._cache = cache

    def _keep(self, values: Tensor) -> int:
        """The address of a copy in float32, which lives as long as the stack."""
        self._floats.append(values.detach().float().contiguous().clone())
        return self._floats[-1].data_ptr()
