"""How a draft's logits become the next drafted token where it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.request import Request
from server.engine.sampling.random import Purpose, uniforms


@dataclass(frozen=True)
class DraftChoice:
    """Greedy, or drawn from the draft's own distribution at the request's temperature."""

    probabilistic: bool

    def draw(self, logits: Tensor, requests: Sequence[Request], ahead: int) -> tuple[Tensor, Tensor]:
        """Draw one token a row.

        Args:
            logits: [R, V] over the target's vocabulary.
            requests: R, whose seeds and temperatures count.
            ahead: tokens drafted before this one.

        Returns:
            Ids [R] int64, and the distribution [R, V] float64 that they were drawn from.
        """
        best = logits.max(-1).indices
        device = logits.device
        temperatures = torch.tensor([max(request.params.temperature, 1e-5) for request in requests], device=device)
        shares = torch.softmax(logits.double() / temperatures[:, None], -1)
        greedy = torch.tensor([request.sampling.greedy for request in requests], device=device)
        shares[greedy] = torch.nn.functional.one_hot(best[greedy], logits.shape[1]).double()
        numbers = uniforms(
            [request.params.seed for request in requests],
            [len(request.output) + ahead for request in requests],
            Purpose.DRAFT,
        )
        sums = shares.cumsum(-1)
        points = torch.from_numpy(numbers).to(device) * sums[:, -1]
        drawn = torch.searchsorted(sums, points[:, None], right=True).squeeze(1)
        return drawn.clamp_(max=logits.shape[1] - 1), shares
