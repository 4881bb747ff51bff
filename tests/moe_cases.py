"""Random experts in every format, and what they compute by definition."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from server.engine.moe.base import ExpertWeights, QuantizedExperts
from server.engine.quantization.format import UNQUANTIZED, Unquantized, WeightFormat
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.int4 import Int4
from server.engine.quantization.nvfp4 import Nvfp4
from server.engine.quantization.quantize import quantize
from server.engine.quantization.stored import QuantizedTensors

EXPERTS, TOP_K, HIDDEN, WIDTH = 5, 2, 160, 96
"""No multiples of the kernels' blocks."""

FORMATS: tuple[WeightFormat, ...] = (
    UNQUANTIZED,
    Fp8("tensor"),
    Fp8("channel"),
    Fp8("block", "weight_scale_inv"),
    Fp8("block", "weight_scale_inv", block=(32, 64)),
    Int4(32),
    Int4(32, symmetric=False),
    Int4(None),
    Nvfp4("modelopt", 0),
    Nvfp4("compressed-tensors"),
)


def make_experts(
    format: WeightFormat,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    sizes: tuple[int, int, int] = (EXPERTS, HIDDEN, WIDTH),
) -> ExpertWeights | QuantizedExperts:
    """Normal weights of about unit gain, rounded to the format; every projection has scales of its own."""
    experts, hidden, width = sizes
    random = torch.Generator(device).manual_seed(seed)

    def normal(rows: int, columns: int) -> Tensor:
        drawn = torch.randn(rows, columns, generator=random, device=device)
        return drawn * columns**-0.5 * (0.5 + torch.rand(1, generator=random, device=device))

    gates = [[normal(width, hidden) for _ in range(2)] for _ in range(experts)]
    downs = [normal(hidden, width) for _ in range(experts)]
    if isinstance(format, Unquantized):
        w13 = torch.stack([torch.cat(pair) for pair in gates]).to(device, dtype)
        return ExpertWeights(w13, torch.stack(downs).to(device, dtype))
    gate_up = QuantizedTensors.allocate(format, width, hidden, device, (experts, 2))
    down = QuantizedTensors.allocate(format, hidden, width, device, (experts,))
    for i in range(experts):
        for j in range(2):
            for name, part in quantize(gates[i][j], format).items():
                gate_up.parts[name][i, j].copy_(part)
        for name, part in quantize(downs[i], format).items():
            down.parts[name][i].copy_(part)
    return QuantizedExperts(gate_up, down)


def random_inputs(
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    sizes: tuple[int, int, int] = (EXPERTS, TOP_K, HIDDEN),
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, distinct expert ids and weights; the last expert is nobody's."""
    experts, top_k, hidden = sizes
    random = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(tokens, hidden, generator=random).to(device, dtype)
    ids = torch.rand(tokens, experts - 1, generator=random).argsort(-1)[:, :top_k].contiguous().to(device)
    return x, ids, torch.rand(tokens, top_k, generator=random).to(device, dtype)


def expected(x: Tensor, experts: ExpertWeights | QuantizedExperts, ids: Tensor, weights: Tensor) -> Tensor:
    """In fp64, token by token; fp64 [T, hidden]."""
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        gate_up, down = (w.double() for w in experts.expert(expert, torch.float32))
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ gate_up.T).chunk(2, -1)
        out[tokens] += ((F.silu(gate) * up) @ down.T) * weights[tokens, places, None].double()
    return out
