"""Which drafted tokens become part of the sequence: exactly, so that it is distributed as the target alone has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from server.engine.request import Draft, Request
from server.engine.sampling.random import Purpose, uniforms
from server.engine.sampling.transfer import to_device


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


@dataclass(frozen=True)
class DrawnDraft:
    """A draft whose tokens were each drawn from a distribution q, and what the target says to it."""

    request: Request
    """Its seed and position choose the random numbers."""
    draft: Draft
    """k ids with q, [k, V]."""
    sampled: Sequence[int]
    """k + 1 ids drawn from the target; the last is the token after a draft that is accepted whole."""


def accept_or_resample(drafts: Sequence[DrawnDraft], target: Tensor) -> list[list[int]]:
    """The tokens that sequences gain whose drafts were drawn from distributions of their own.

    A draft x is accepted with probability min(1, p(x) / q(x)); the first rejected one is replaced by a draw from
    max(0, p - q), renormalised (Leviathan et al. 2023, arXiv 2211.17192, theorem 1 and appendix A.1).

    Args:
        drafts: N, at least one, each of at least one token.
        target: p, [sum of k + 1, V] float64: for each draft, after its first 0 … k tokens.

    Returns:
        N lists.
    """
    device = target.device
    sizes = [len(one.draft.token_ids) for one in drafts]
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    # Row j of the drafts' tokens is row `places[j]` of `target`, which has one more for each draft.
    places = to_device(
        np.concatenate([np.arange(k) + at + i for i, (k, at) in enumerate(zip(sizes, firsts, strict=True))]), device
    )
    q = torch.cat([_shares(one) for one in drafts])
    ids = to_device(np.array([token_id for one in drafts for token_id in one.draft.token_ids]), device)[:, None]
    numbers = to_device(_uniforms(drafts, Purpose.ACCEPT), device)
    accepted = (numbers * q.gather(1, ids).squeeze(1) < target[places].gather(1, ids).squeeze(1)).tolist()
    gained, rejected = [], []
    for i, (one, k, first) in enumerate(zip(drafts, sizes, firsts, strict=True)):
        count = next((j for j in range(k) if not accepted[first + j]), k)
        gained.append([*one.draft.token_ids[:count], one.sampled[k] if count == k else one.draft.token_ids[count]])
        if count < k:
            rejected.append((i, first + count))
    if rejected:
        rows = to_device(np.array([row for _, row in rejected]), device)
        residual = (target[places[rows]] - q[rows]).clamp_(min=0)
        points = to_device(_uniforms(drafts, Purpose.RESAMPLE)[[row for _, row in rejected]], device)
        for (i, _), token_id in zip(rejected, _drawn(residual, points, ids[rows]), strict=True):
            gained[i][-1] = token_id
    return gained


def _shares(one: DrawnDraft) -> Tensor:
    assert one.draft.probabilities is not None
    return one.draft.probabilities


def _uniforms(drafts: Sequence[DrawnDraft], purpose: Purpose) -> npt.NDArray[np.float64]:
    """One number for each token of each draft."""
    places = [(one.request, ahead) for one in drafts for ahead in range(len(one.draft.token_ids))]
    seeds = [request.params.seed for request, _ in places]
    return uniforms(seeds, [len(request.output) + ahead for request, ahead in places], purpose)


def _drawn(weights: Tensor, numbers: Tensor, otherwise: Tensor) -> list[int]:
    """A token of each row [R, V] by inverse transform of numbers [R]; `otherwise` [R, 1] where no weight is left."""
    sums = weights.cumsum(-1)
    found = torch.searchsorted(sums, (numbers * sums[:, -1])[:, None], right=True)
    # Rounding may leave nothing where p and q agree; then the rejected draft was as good as any.
    found = torch.where((sums[:, -1:] > 0) & (found < weights.shape[1]), found, otherwise)
    chosen: list[int] = found.squeeze(1).tolist()
    return chosen


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
        (accepted,) = self.accepted([request.params.seed], [len(request.output)], [len(drafts)])
        return [*drafts[:accepted], sampled[accepted]]

    def accepted(self, seeds: Sequence[int], positions: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """How many drafts of each sequence are accepted.

        Args:
            seeds: R requests' seeds.
            positions: R numbers of tokens that they have generated.
            drafted: R numbers of drafts.
        """
        longest = max(drafted, default=0)
        if not longest:
            return [0] * len(drafted)
        lots = uniforms(
            [seed for seed in seeds for _ in range(longest)],
            [position + ahead for position in positions for ahead in range(longest)],
            Purpose.ACCEPT,
        ).reshape(-1, longest)
        rates = np.array([self.rates[min(ahead, len(self.rates) - 1)] for ahead in range(longest)])
        won = (lots < rates) & (np.arange(longest) < np.array(drafted)[:, None])
        accepted: list[int] = won.cumprod(1).sum(1).tolist()
        return accepted
