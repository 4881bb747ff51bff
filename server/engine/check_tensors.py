"""Whether the planned models would find their tensors in the checkpoints: told from headers, in no memory."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode

from server.engine.loading.load import match_weights
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM, build_model
from server.engine.models.recurrent import build_recurrent
from server.engine.runner import build_context
from server.engine.setup import ModelSetup
from server.spec.build import naming_draft
from server.spec.draft_plan import DraftPlan


def check_tensors(target: ModelSetup, draft: DraftPlan | None) -> None:
    """Build the models of tensors that have shapes and no memory, and match them with the files.

    Raises:
        UserError: a tensor is missing, left over, misshapen, or of a type that the model cannot read.
    """
    context = build_context(target)
    with FakeTensorMode():
        model = build_model(target.layers, context)
        match_weights(model, target.checkpoint, target.load_format)
    if draft is not None and draft.setup is not None:
        with naming_draft(draft.setup):
            _check_draft(draft.setup, model)


def _check_draft(setup: ModelSetup, target: CausalLM) -> None:
    context = build_context(setup)
    with FakeTensorMode():
        if isinstance(setup.config, ModelConfig):
            match_weights(build_model(setup.config, context, lent=target.ends), setup.checkpoint, setup.load_format)
        else:
            head = build_recurrent(setup.config, context, target.ends)
            match_weights(head, setup.checkpoint, setup.load_format)
