"""The dense feed-forward block."""

from __future__ import annotations

from torch import Tensor, nn

from server.engine.layers.context import BuildContext
from server.engine.layers.linear import column_parallel, row_parallel


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, hidden_size: int, intermediate_size: int, context: BuildContext, *, bias: bool = False) -> None:
        super().__init__()
        halves = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = column_parallel(hidden_size, halves, context, bias=bias)
        self.down_proj = row_parallel(intermediate_size, "down_proj", hidden_size, context, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden_size] -> the same."""
        out: Tensor = self.down_proj(self.gate_up_proj.gated(x))
        return out

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under `prefix`, and the memory they fill."""
        return self.gate_up_proj.weight_targets(f"{prefix}.") | self.down_proj.weight_targets(f"{prefix}.")
