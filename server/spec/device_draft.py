"""Drafting without the host: the whole chain of k steps from what a verification left on the device.

The same arithmetic as the proposers', for rows of equal length: all k + 1 verified tokens of a row are taken in, the
rejected ones among them. What those write lies beyond the accepted tokens, where the chain writes again before it
reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from server.engine.models.decoder import CausalLM
from server.engine.models.draft import DraftHidden, RecurrentDraft, TargetHidden
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.mtp import MTPDraft
from server.engine.resident import Verdict
from server.engine.runner import ModelRunner
from server.engine.uniform import places, plan_of


@dataclass(frozen=True)
class Verified:
    """R rows after a verification of k drafts each."""

    verdict: Verdict
    hidden: TargetHidden
    """Of the verified tokens, [R * (k + 1), …]."""
    blocks: Tensor
    """int64 [R, W]."""


class DeviceDraft(Protocol):
    """Makes k tokens a row; never waits for the device where its attention does not."""

    def draft(self, verified: Verified) -> Tensor:
        """Take note of a verification and draft: int64 [R, k]."""


class RecurrentDeviceDraft:
    """Chains of an EAGLE-3 or MTP head; see `RecurrentProposer`."""

    def __init__(self, runner: ModelRunner[Eagle3Draft | MTPDraft], num_tokens: int, vocab_size: int) -> None:
        """Make a chain.

        Args:
            runner: the head's.
            num_tokens: k.
            vocab_size: the target's.
        """
        self._runner = runner
        self._model: RecurrentDraft = runner.model
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size

    def draft(self, verified: Verified) -> Tensor:
        """See `DeviceDraft.draft`."""
        verdict = verified.verdict
        rows, width = verdict.emitted.shape
        made = self._run(self._model.combine(verified.hidden), verdict.emitted, verdict.first, verified, 0)
        last = torch.arange(0, rows * width, width, device=verdict.first.device) + verdict.accepted
        output, recurrent = made.output[last], made.recurrent[last]
        drafted = [self._choose(output)]
        for ahead in range(1, self._num_tokens):
            first = verdict.first + verdict.accepted + ahead
            made = self._run(recurrent, drafted[-1][:, None], first, verified, ahead)
            recurrent = made.recurrent
            drafted.append(self._choose(made.output))
        return torch.stack(drafted, 1)

    def _run(self, hidden: Tensor, ids: Tensor, first: Tensor, verified: Verified, step: int) -> DraftHidden:
        at = places(first, ids.shape[1], verified.blocks, verified.verdict.real, self._runner.pages)
        return self._model(hidden, ids.flatten(), at.positions, plan_of(self._runner.attention, at.step), step)

    def _choose(self, output: Tensor) -> Tensor:
        return self._model.highest(output, self._vocab_size)


class ModelDeviceDraft:
    """Chains of a draft that is a whole model; see `DraftModelProposer`."""

    def __init__(self, runner: ModelRunner[CausalLM], num_tokens: int, vocab_size: int) -> None:
        """Make a chain.

        Args:
            runner: the draft model's.
            num_tokens: k.
            vocab_size: ids that both models know.
        """
        self._runner = runner
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size

    def draft(self, verified: Verified) -> Tensor:
        """See `DeviceDraft.draft`.

        The draft model has run all tokens but the newest and, if every draft was accepted, the last draft: running both
        in any case keeps the rows alike.
        """
        verdict = verified.verdict
        last = verdict.accepted[:, None]
        both = torch.cat((verdict.inputs.gather(1, last), verdict.emitted.gather(1, last)), 1)
        output = self._run(both, verdict.first + verdict.accepted, verified)[1::2]
        drafted = [self._choose(output)]
        for ahead in range(1, self._num_tokens):
            first = verdict.first + verdict.accepted + 1 + ahead
            drafted.append(self._choose(self._run(drafted[-1][:, None], first, verified)))
        return torch.stack(drafted, 1)

    def _run(self, ids: Tensor, first: Tensor, verified: Verified) -> Tensor:
        at = places(first, ids.shape[1], verified.blocks, verified.verdict.real, self._runner.pages)
        hidden: TargetHidden = self._runner.model(ids.flatten(), at.positions, plan_of(self._runner.attention, at.step))
        return hidden.final

    def _choose(self, output: Tensor) -> Tensor:
        return self._runner.model.highest(output, self._vocab_size)
