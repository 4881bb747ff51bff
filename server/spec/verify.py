"""Which drafted tokens become part of the sequence: exactly, so that it is distributed as the target alone has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine.request import Draft, Request
from server.engine.sampling.random import Purpose, uniforms


def confirmed(drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
    """The tokens that a sequence gains: drafts as long as the target drew the same, then what it drew.

    Each position is sampled from the target's distribution after exactly the drafts before it, with the random number
    that plain decoding would use there. So a draft x is accepted with the target's probability of x, and the token that
    replaces a rejected one follows the target's distribution without x, renormalised: the accept/resample rule of
    Leviathan et al. 2023 (arXiv 2211.17192) for a draft that is its proposer's only choice. And a seeded answer is the
    same with and without drafts.

    Args:
        drafts: k drafted ids.
        sampled: k + 1 ids drawn from the target, the first without any draft, the last after all of them.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == sampled[accepted]:
        accepted += 1
    return list(sampled[: accepted + 1])


def accept_or_resample(request: Request, draft: Draft, target: Tensor, sampled: Sequence[int]) -> list[int]:
    """The tokens that a sequence gains when each draft was drawn from a distribution q of its own.

    A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from
    max(0, p - q), renormalised (Leviathan et al. 2023, arXiv 2211.17192, theorem 1 and appendix A.1).

    Args:
        request: its seed and position choose the random numbers.
        draft: k ids with q, [k, V].
        target: p, [k + 1, V] float64, after the first 0 … k drafts.
        sampled: k + 1 ids drawn from p; the last is the token after an accepted draft.
    """
    assert draft.probabilities is not None
    count = len(draft.token_ids)
    seeds = [request.params.seed] * count
    positions = [len(request.output) + ahead for ahead in range(count)]
    accept = uniforms(seeds, positions, Purpose.ACCEPT)
    resample = uniforms(seeds, positions, Purpose.RESAMPLE)
    ids = torch.tensor(draft.token_ids, device=target.device)[:, None]
    wanted = target[:count].gather(1, ids).squeeze(1).tolist()
    proposed = draft.probabilities.gather(1, ids).squeeze(1).tolist()
    for i, token_id in enumerate(draft.token_ids):
        if accept[i] * proposed[i] < wanted[i]:
            continue
        residual = (target[i] - draft.probabilities[i]).clamp_(min=0)
        sums = residual.cumsum(0)
        point = float(resample[i]) * float(sums[-1])
        instead = int(torch.searchsorted(sums, point, right=True))
        # Rounding may leave nothing where p and q agree; then the rejected draft was as good as any.
        replacement = instead if float(sums[-1]) > 0 and instead < len(sums) else token_id
        return [*draft.token_ids[:i], replacement]
    return [*draft.token_ids, sampled[count]]


@dataclass(frozen=True)
class SyntheticAcceptance:
    """Accepts by lot, whatever the tokens: for benchmarks only, the text is worth nothing."""

    rates: tuple[float, ...]
    """By position: the probability that a draft is accepted when those before it were."""

    @classmethod
    def of_length(cls, length: float, max_tokens: int) -> SyntheticAcceptance:
        """The same rate r at every position, so that 1 + r + … + r^k tokens come of a step on average.

        Raises:
            ValueError: `length` is not within 1 and max_tokens + 1.
        """
        if not 1 <= length <= max_tokens + 1:
            raise ValueError(f"a step with {max_tokens} drafts makes 1 to {max_tokens + 1} tokens, not {length}")
        low, high = 0.0, 1.0
        for _ in range(60):
            rate = (low + high) / 2
            if sum(rate**i for i in range(max_tokens + 1)) < length:
                low = rate
            else:
                high = rate
        return cls((high,) * max_tokens)

    def confirmed(self, request: Request, drafts: Sequence[int], sampled: Sequence[int]) -> list[int]:
        """The tokens that a sequence gains by lot; arguments as of `confirmed`."""
        positions = [len(request.output) + ahead for ahead in range(len(drafts))]
        lots = uniforms([request.params.seed] * len(drafts), positions, Purpose.ACCEPT)
        accepted = 0
        while accepted < len(drafts) and lots[accepted] < self.rates[min(accepted, len(self.rates) - 1)]:
            accepted += 1
        return [*drafts[:accepted], sampled[accepted]]
