"""Linear layers whose rows may be several checkpoint tensors, and how they are split over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.layers.context import BuildContext

# Tells oneDNN which layout to prefer. The layout it picks for 32 rows was the best one for 1 to 256 rows.
_PACK_ROWS = 32


class Linear(nn.Module):
    """x @ weight.T + bias, where the weight's rows are the concatenated rows of named checkpoint tensors."""

    def __init__(
        self,
        in_features: int,
        shards: Mapping[str, int],
        context: BuildContext,
        *,
        bias: bool = False,
        weight: nn.Parameter | None = None,
    ) -> None:
        """Make the memory.

        Args:
            in_features: this rank's input width.
            shards: checkpoint name (the last part, such as "q_proj") -> this rank's rows of it, in order.
            context: dtype and device.
            bias: whether every shard has one.
            weight: memory of another layer to share (tied embeddings), [rows, in_features].
        """
        super().__init__()
        self.shards = dict(shards)
        rows = sum(self.shards.values())
        self.weight: nn.Parameter | None = context.parameter(rows, in_features) if weight is None else weight
        self.bias = context.parameter(rows) if bias else None
        self.packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[T, in_features] -> [T, rows]."""
        if self.packed is not None:
            product: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.packed, self.bias, "none", [], "")
            return product
        assert self.weight is not None
        return F.linear(x, self.weight, self.bias)

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names, `prefix` (with its dot) + shard, and the rows they fill."""
        targets: dict[str, Tensor] = {}
        for kind, memory in (("weight", self.weight), ("bias", self.bias)):
            if memory is not None:
                parts = torch.split(memory, list(self.shards.values()))
                targets |= {f"{prefix}{name}.{kind}": part for name, part in zip(self.shards, parts, strict=True)}
        return targets

    def finish_loading(self) -> None:
        """On a CPU with bf16 instructions, keep the weight in oneDNN's own layout in place of the plain one.

        Decode steps (up to some hundred rows) take 60 to 80 % of the time; long ones are even.
        """
        weight = self.weight
        if weight is None or weight.device.type != "cpu" or weight.dtype is not torch.bfloat16:
            return
        if torch.ops.mkldnn._is_mkldnn_bf16_supported():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
            self.weight = None


def column_parallel(
    in_features: int, shards: Mapping[str, int], context: BuildContext, *, bias: bool = False
) -> Linear:
    """Every rank holds all inputs and its share of each shard's rows (given as totals)."""
    own = {name: context.group.split(rows, name) for name, rows in shards.items()}
    return Linear(in_features, own, context, bias=bias)


def row_parallel(
    in_features: int, name: str, out_features: int, context: BuildContext, *, bias: bool = False
) -> Linear:
    """Every rank holds its share of the inputs (`in_features` is the total) and all rows."""
    return Linear(context.group.split(in_features, name), {name: out_features}, context, bias=bias)
