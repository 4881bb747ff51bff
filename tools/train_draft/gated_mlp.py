"""Feed-forward parts to train: SiLU-gated, and a mixture of such experts behind a sigmoid router."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_draft.fused import gated

_BALANCE_RATE = 1e-3


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        out: Tensor = self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))
        return out


class Router(nn.Module):
    """Sigmoid scores, chosen with a bias that evens the load out (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, hidden_size: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden_size).normal_(std=0.02))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)


class MixtureOfExperts(nn.Module):
    """Top-k of E experts with weights that sum to 1, beside a shared expert."""

    def __init__(self, hidden_size: int, width: int, experts: int, top_k: int, shared: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = Router(hidden_size, experts)
        self.experts = nn.ModuleList(GatedMLP(hidden_size, width) for _ in range(experts))
        self.shared_experts = GatedMLP(hidden_size, shared * width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        flat = x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(flat.float(), self.gate.weight).sigmoid()
        ids = (scores + self.gate.e_score_correction_bias).topk(self.top_k, -1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        out = self.shared_experts(flat).float()
        # By expert, so that each one's tokens lie behind each other, and one wait for the device counts them all.
        order = ids.flatten().argsort(stable=True)
        rows = order // self.top_k
        load = ids.flatten().bincount(minlength=len(self.experts))
        self.gate.load += load
        parts = flat[rows].split(load.tolist())
        made = torch.cat([expert(part) for expert, part in zip(self.experts, parts, strict=True)])
        out = out.index_add(0, rows, made.float() * weights.flatten()[order, None])
        mixed: Tensor = out.view(x.shape)
        return mixed

    @torch.no_grad()
    def balance(self) -> None:
        """Move the bias towards experts that got less than their share since the last call."""
        load = self.gate.load
        self.gate.e_score_correction_bias += _BALANCE_RATE * (load.mean() - load).sign()
        load.zero_()
