"""Builds the draft that a plan names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from server.engine.kv.groups import Pages
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.mtp import MTPDraft
from server.engine.runner import ModelRunner, Progress, build_draft_model, build_head
from server.engine.setup import ModelSetup
from server.errors import UserError
from server.spec.base import Proposer
from server.spec.choice import DraftChoice
from server.spec.device_draft import DeviceDraft, ModelDeviceDraft, RecurrentDeviceDraft
from server.spec.draft_model import DraftModelProposer
from server.spec.draft_plan import DraftPlan
from server.spec.length import DraftLength
from server.spec.ngram import NgramProposer
from server.spec.recurrent import RecurrentProposer
from server.spec.settings import KEY
from server.spec.speculator import Speculator


@dataclass(frozen=True)
class BuiltDraft:
    """A draft that is ready to run."""

    speculator: Speculator
    runner: ModelRunner[CausalLM | Eagle3Draft | MTPDraft] | None
    """Of the draft model, if there is one."""
    on_device: DeviceDraft | None
    """Drafts without the host; None where each draft needs it (ngram, drawn drafts)."""


def build_draft(plan: DraftPlan, pages: Pages, target: CausalLM, progress: Progress) -> BuiltDraft:
    """Build and fill what the plan names.

    Args:
        plan: the draft's.
        pages: of the draft's KV group.
        target: lends its embedding and head where the draft has none.
        progress: called with (bytes done, bytes in all).

    Raises:
        UserError: weights that do not fit.
    """
    proposer: Proposer
    on_device: DeviceDraft | None = None
    runner: ModelRunner[CausalLM | Eagle3Draft | MTPDraft] | None = None
    choice = DraftChoice(plan.probabilistic)
    if plan.setup is None:
        proposer = NgramProposer(*plan.lookup)
    elif isinstance(plan.setup.config, ModelConfig):
        with naming_draft(plan.setup):
            model = runner = build_draft_model(plan.setup, pages, target, progress)
        proposer = DraftModelProposer(model, choice, plan.max_model_len, plan.shared_vocab_size)
        on_device = ModelDeviceDraft(model, plan.num_tokens, plan.shared_vocab_size)
    else:
        with naming_draft(plan.setup):
            head = runner = build_head(plan.setup, pages, target, progress)
        proposer = RecurrentProposer(head, choice, plan.max_model_len, plan.shared_vocab_size)
        on_device = RecurrentDeviceDraft(head, plan.num_tokens, plan.shared_vocab_size)
    length = DraftLength(plan.num_tokens, plan.adaptive, plan.rules)
    speculator = Speculator(proposer, runner, length, plan.num_tokens)
    return BuiltDraft(speculator, runner, None if plan.probabilistic else on_device)


@contextmanager
def naming_draft(setup: ModelSetup) -> Iterator[None]:
    """Say of errors in weights that they are the draft's."""
    try:
        yield
    except UserError as error:
        raise UserError(f"draft: {KEY}model {setup.checkpoint.source}: {error}") from None
