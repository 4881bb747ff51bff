"""Attention while a draft is unrolled in training, as the server computes it (EAGLE-3, arXiv 2503.01840).

Draft number s of an anchor a runs at position a + s. It sees the target's true past (the keys that the head made in its
first step, up to a), and what the head itself made at a + 1 … a + s.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from server.engine.layers.rope import RopeConfig, inverse_frequencies
from tools.train_draft.fused import rms_norm


class RMSNorm(nn.Module):
    """As the server's, with a weight to train."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> the same in bf16, computed in fp32."""
        out: Tensor = rms_norm(x, self.weight, self.eps)
        return out


@dataclass(frozen=True)
class Window:
    """A anchors of each of B sequences, one after the other: the positions where drafting begins."""

    positions: Tensor
    """int64 [B, A]; rows that have fewer anchors go on at their last position."""
    mask: Tensor
    """bf16 [B, 1, 1, A, L], 0 where an anchor sees a position, -inf elsewhere."""

    @classmethod
    def over(cls, first: Tensor, anchors: int, length: int) -> Window:
        """From `first` [B] on, in sequences of up to `length` tokens."""
        positions = (first[:, None] + torch.arange(anchors, device=first.device)).clamp(max=length - 1)
        hidden = torch.arange(length, device=first.device) > positions[..., None]
        mask = torch.zeros(hidden.shape, dtype=torch.bfloat16, device=first.device).masked_fill(hidden, float("-inf"))
        return cls(positions, mask[:, None, None])

    def of(self, x: Tensor) -> Tensor:
        """[B, L, …] -> [B, A, …]."""
        return x[torch.arange(len(x), device=x.device)[:, None], self.positions]


@dataclass
class Past:
    """Keys and values: of all L positions in step 0, of A anchors in each later one; [B, kv heads, …, head dim]."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class ChainAttention(nn.Module):
    """Grouped-query attention with rotary embeddings, without biases."""

    frequencies: Tensor

    def __init__(self, input_size: int, hidden_size: int, heads: int, kv_heads: int, head_dim: int, rope: RopeConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(input_size, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=False)
        self._rope = rope
        self.register_buffer("frequencies", inverse_frequencies(rope), persistent=False)

    def forward(self, x: Tensor, window: Window, step: int, past: Past, context: Tensor | None = None) -> Tensor:
        """Attend from each anchor, and add the step's keys and values to `past`.

        Args:
            x: [B, A, input size] by anchor.
            window: where the anchors are.
            step: 0, 1, …
            past: of the earlier steps.
            context: [B, L, input size], of all positions, in step 0; it holds `x`.

        Returns:
            [B, A, hidden size].
        """
        rows, anchors, _ = x.shape
        positions = window.positions + step
        source, places = (
            (x, positions) if context is None else (context, torch.arange(context.shape[1], device=x.device)[None])
        )
        past.keys.append(self._turn(self._split(self.k_proj(source), self.kv_heads), places))
        past.values.append(self._split(self.v_proj(source), self.kv_heads))
        group = self.heads // self.kv_heads
        q = self._turn(self._split(self.q_proj(x), self.heads), positions) * self.head_dim**-0.5
        grouped = q.view(rows, self.kv_heads, group, anchors, self.head_dim)
        scores = (grouped.flatten(2, 3) @ past.keys[0].mT).unflatten(2, (group, anchors))
        scores = scores + window.mask
        own = [(grouped * key[:, :, None]).sum(-1, keepdim=True) for key in past.keys[1:]]
        weights = torch.cat([scores, *own], -1).softmax(-1, dtype=torch.float32).to(q.dtype)
        length = scores.shape[-1]
        out = (weights[..., :length].flatten(2, 3) @ past.values[0]).view(grouped.shape)
        for i, value in enumerate(past.values[1:]):
            out = out + weights[..., length + i : length + i + 1] * value[:, :, None]
        attended: Tensor = self.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))
        return attended

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_dim).transpose(1, 2)

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, :, None].float() * self.frequencies
        cos = (angles.cos() * self._rope.attention_factor).to(x.dtype)
        sin = (angles.sin() * self._rope.attention_factor).to(x.dtype)
        turning, passing = x[..., : self._rope.rotary_dim], x[..., self._rope.rotary_dim :]
        a, b = turning.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, passing), -1)
