"""The attention block around a backend: projections, head norms, rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from server.engine.attention.base import RotatingAttention
from server.engine.layers.context import BuildContext
from server.engine.layers.linear import column_parallel, row_parallel
from server.engine.layers.norm import QueryKeyNorm
from server.engine.layers.rope import Angles, rotate


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads; it holds its backend and its place in the cache."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        layer_id: int,
        context: BuildContext,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        input_size: int | None = None,
    ) -> None:
        """Make the memory.

        Args:
            hidden_size: width of the output, and of the input unless `input_size` differs.
            num_heads: query heads over all ranks.
            num_kv_heads: key and value heads over all ranks.
            head_dim: width of one head.
            layer_id: index into the backend's layers.
            context: dtype, device, backend and ranks.
            qkv_bias: whether q, k and v have biases.
            o_bias: whether the output projection has one.
            qk_norm_eps: epsilon of the per-head norms of queries and keys; None when the model has none.
            input_size: width of the input where it is not the output's (EAGLE-3's first layer).
        """
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = context.group.split(num_heads, "num_attention_heads")
        self.num_kv_heads = context.group.split(num_kv_heads, "num_key_value_heads")
        kv = num_kv_heads * head_dim
        shards = {"q_proj": num_heads * head_dim, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = column_parallel(input_size or hidden_size, shards, context, bias=qkv_bias)
        self.o_proj = row_parallel(num_heads * head_dim, "o_proj", hidden_size, context, bias=o_bias)
        self.qk_norm = None
        if qk_norm_eps is not None:
            self.qk_norm = QueryKeyNorm(self.num_heads, self.num_kv_heads, head_dim, qk_norm_eps, context)
        self.layer_id = layer_id
        self.backend = context.attention
        self.rotating = context.attention if isinstance(context.attention, RotatingAttention) else None

    def forward(self, x: Tensor, angles: Angles, plan: Any) -> Tensor:
        """[T, input_size] -> [T, hidden_size]; `plan` is the backend's for this step."""
        qkv = self.qkv_proj(x)
        if self.rotating is not None:
            norms, eps = (None, 0.0) if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
            out = self.rotating.forward_qkv(qkv, norms, eps, *angles, self.layer_id, plan)
        else:
            out = self._rotate_and_attend(qkv, angles, plan)
        projected: Tensor = self.o_proj(out)
        return projected

    def _rotate_and_attend(self, qkv: Tensor, angles: Angles, plan: Any) -> Tensor:
        # Queries and keys lie side by side: one norm and one rotation take both.
        heads = qkv.view(len(qkv), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        qk, v = heads[:, : -self.num_kv_heads], heads[:, -self.num_kv_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotate(qk, angles)
        return self.backend.forward(qk[:, : self.num_heads], qk[:, self.num_heads :], v, self.layer_id, plan)

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under `prefix`, and the memory they fill."""
        targets = self.qkv_proj.weight_targets(f"{prefix}.") | self.o_proj.weight_targets(f"{prefix}.")
        if self.qk_norm is not None:
            targets |= self.qk_norm.weight_targets(prefix)
        return targets
