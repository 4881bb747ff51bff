"""Which of its two ends a whole draft model has, and which it borrows from its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from server.checkpoint.tensor_header import TensorHeader
from server.engine.models.config import ModelConfig
from server.engine.models.nextn_names import hf_names
from server.errors import UserError

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def borrowing(draft: ModelConfig, headers: Mapping[str, TensorHeader], target: ModelConfig) -> ModelConfig:
    """The draft's config, told what its files lack.

    Args:
        draft: a whole model, as its config describes it.
        headers: its tensors, under the names of safetensors or of GGUF; empty when it has none to load.
        target: lends.

    Raises:
        UserError: an end is missing, and the target's has another shape.
    """
    names = hf_names(headers)
    if not any(name.startswith("model.layers.") for name in names):
        return draft
    own_embedding = EMBEDDING in names
    own_head = HEAD in names or draft.tie_word_embeddings
    missing = [name for name, own in ((EMBEDDING, own_embedding), (HEAD, own_head)) if not own]
    if missing and (draft.vocab_size, draft.hidden_size) != (target.vocab_size, target.hidden_size):
        raise UserError(
            f"the checkpoint lacks {' and '.join(missing)}, and the draft cannot borrow the target's: it has a "
            f"vocabulary of {draft.vocab_size} and width {draft.hidden_size}, the target {target.vocab_size} and "
            f"{target.hidden_size}"
        )
    return replace(draft, own_embedding=own_embedding, own_head=own_head)
