"""An EAGLE-3 head's shape and options: the tensors' where the tensors tell, the config's for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from server.checkpoint.tensor_header import TensorHeader
from server.engine.layers.hf_keys import Keys
from server.engine.models.aux_layers import AuxLayers, aux_layers
from server.engine.models.config import ModelConfig
from server.engine.models.draft_vocab import DraftVocab, draft_vocab
from server.engine.models.eagle3_layer_config import layer_config
from server.engine.models.eagle3_names import canonical_name, file_names
from server.engine.quantization.plain_headers import plain_headers
from server.errors import UserError

_DEFAULT_CAPTURED = 3
_FIXED = {
    "use_last_layernorm": True,
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Options of modelopt's `eagle_config` that would change the arithmetic, at the value that is computed here."""


@dataclass(frozen=True)
class Eagle3Config:
    """Everything that building a head needs to know."""

    model: ModelConfig
    """Its layers; `vocab_size` is the target's."""
    target_hidden_size: int
    aux: AuxLayers | None
    """The hidden states that `fc` takes; None for a head that starts from the target's final ones, without `fc`."""
    vocab: DraftVocab
    aux_norm: Literal["none", "chunks", "whole"]
    """RMS norm before `fc`: of each captured hidden state (`fc_norm`) or of all of them together (`input_norm`)."""
    fc_bias: bool
    norm_before_residual: bool
    """Whether the first layer's residual is the normalised hidden state."""
    norm_output: bool
    """Whether the next step gets the hidden state after the final norm, as its logits do."""
    embedding: Literal["own", "target's"]
    head: Literal["own", "embedding's", "target's"]
    names: Mapping[str, str]
    """Canonical tensor name -> name in the file; empty without files."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was inferred and how, for the user."""
        aux = "the target's final hidden states" if self.aux is None else self.aux.why
        return (f"hidden states: {aux}", f"draft vocabulary: {self.vocab.why}")

    def file_module(self, module: str) -> str:
        """The name in the file of a module, such as "layers.0"."""
        start = f"{module}."
        for part, name in self.names.items():
            if part.startswith(start) and name.endswith(part.removeprefix(module)):
                return name.removesuffix(part.removeprefix(module))
        return module

    @property
    def capture(self) -> tuple[int, ...]:
        """What the target is to capture."""
        return () if self.aux is None else self.aux.boundaries

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        headers: Mapping[str, TensorHeader],
        target: ModelConfig,
        aux_override: Sequence[int] | None = None,
    ) -> Eagle3Config:
        """Read a head's folder.

        Args:
            config: its config.json.
            headers: its tensors; empty for random weights, and then the config decides everything.
            target: the model it drafts for.
            aux_override: layer boundaries that the user names, see `aux_layers`.

        Raises:
            UserError: the head does not fit the target, lacks a part that it cannot borrow, or has options that are not
                supported.
        """
        names = file_names(headers)
        shapes = {canonical_name(name): header.shape for name, header in plain_headers(headers).items()}
        inner = config.get("eagle_config")
        keys = Keys({**config, **(inner if isinstance(inner, Mapping) else {})}, {}, "the draft's config.json")
        _refuse_unsupported(keys, shapes)
        model = layer_config(config, shapes, target.vocab_size)
        _check_target(keys, target)
        aux = _aux(keys, config, shapes, target, aux_override)
        embedding = _embedding(shapes, model, target)
        vocab = _vocab(keys, headers, names, shapes, target.vocab_size)
        return cls(
            model=model,
            target_hidden_size=target.hidden_size,
            aux=aux,
            vocab=vocab,
            aux_norm=_aux_norm(keys, shapes),
            fc_bias="fc.bias" in shapes,
            norm_before_residual=keys.flag("norm_before_residual"),
            norm_output=keys.flag("norm_output"),
            embedding=embedding,
            head=_head(shapes, model, target, vocab, embedding),
            names=names,
        )


def _refuse_unsupported(keys: Keys, shapes: Mapping[str, Any]) -> None:
    for name, fixed in _FIXED.items():
        if name in keys and keys.values[name] != fixed:
            raise keys.bad(name, f"{fixed!r}, the one value that is supported")
    if "mask_hidden" in shapes:
        raise UserError("the EAGLE-3 head holds mask_hidden: it drafts in parallel, which is not supported")
    if "layers.0.self_attn.kv_a_proj_with_mqa.weight" in shapes:
        raise UserError("the EAGLE-3 head has latent attention (kv_a_proj_with_mqa), which is not supported")


def _check_target(keys: Keys, target: ModelConfig) -> None:
    if "target_hidden_size" in keys and keys.integer("target_hidden_size") != target.hidden_size:
        raise keys.bad("target_hidden_size", f"{target.hidden_size}, the target's hidden_size: another model's head?")


def _aux(
    keys: Keys,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    target: ModelConfig,
    override: Sequence[int] | None,
) -> AuxLayers | None:
    if keys.values.get("use_aux_hidden_state") is False:
        if override is not None:
            raise UserError("speculative_config.aux_hidden_state_layers: this EAGLE-3 head captures no layers")
        return None
    if not shapes:
        return aux_layers(config, target.num_layers, override)
    if "fc.weight" not in shapes:
        raise UserError("the EAGLE-3 head lacks fc.weight, which takes the target's hidden states in")
    width = shapes["fc.weight"][-1]
    captured, rest = divmod(width, target.hidden_size)
    if rest:
        raise UserError(
            f"the EAGLE-3 head's fc.weight takes {width} inputs, no multiple of the target's hidden_size "
            f"{target.hidden_size}: it is the head of another model"
        )
    chosen = aux_layers(config, target.num_layers, override)
    if len(chosen.boundaries) != captured:
        raise UserError(
            f"the EAGLE-3 head's fc.weight takes the hidden states of {captured} layers, but {len(chosen.boundaries)} "
            f"are chosen, {list(chosen.boundaries)} ({chosen.why}); name {captured} with "
            "speculative_config.aux_hidden_state_layers"
        )
    return chosen


def _vocab(
    keys: Keys,
    headers: Mapping[str, TensorHeader],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    vocab_size: int,
) -> DraftVocab:
    size = keys.integer("draft_vocab_size") if "draft_vocab_size" in keys else vocab_size
    for part in ("lm_head.weight", "d2t"):
        size = shapes[part][0] if shapes.get(part) else size
    if size > vocab_size:
        raise UserError(f"the EAGLE-3 head scores {size} tokens, more than the target's vocabulary of {vocab_size}")
    if not shapes and size != vocab_size:
        # Random weights know no tokens: the first ones are as good as any.
        return replace(draft_vocab(size, size, None, None), why=f"the first {size} of {vocab_size} tokens")
    d2t, t2d = (headers[names[part]] if part in names else None for part in ("d2t", "t2d"))
    return draft_vocab(size, vocab_size, d2t, t2d)


def _aux_norm(keys: Keys, shapes: Mapping[str, Any]) -> Literal["none", "chunks", "whole"]:
    chunks = "fc_norm.0.weight" in shapes or keys.flag("fc_norm")
    whole = "input_norm.weight" in shapes or keys.flag("norm_before_fc")
    if chunks and whole:
        raise UserError("the EAGLE-3 head has both fc_norm and input_norm (norm_before_fc), which exclude each other")
    return "chunks" if chunks else "whole" if whole else "none"


def _embedding(
    shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, target: ModelConfig
) -> Literal["own", "target's"]:
    rows = shapes.get("embed_tokens.weight", (target.vocab_size,))[0]
    if rows != target.vocab_size:
        raise UserError(
            f"the EAGLE-3 head embeds {rows} tokens, but the target's vocabulary has {target.vocab_size}: it is the "
            "head of another model"
        )
    if "embed_tokens.weight" in shapes:
        return "own"
    if model.hidden_size == target.hidden_size:
        return "target's"
    if not shapes:
        return "own"
    raise UserError(
        f"the EAGLE-3 head holds no embed_tokens.weight, and cannot borrow the target's: its hidden_size "
        f"{model.hidden_size} is not the target's {target.hidden_size}"
    )


def _head(
    shapes: Mapping[str, tuple[int, ...]], model: ModelConfig, target: ModelConfig, vocab: DraftVocab, embedding: str
) -> Literal["own", "embedding's", "target's"]:
    # `tie_word_embeddings` is often left over from the target's config: a head in the file goes before it.
    if "lm_head.weight" in shapes or not shapes:
        return "own"
    if vocab.size == target.vocab_size and vocab.target_ids is None:
        if model.tie_word_embeddings and embedding == "own":
            return "embedding's"
        if model.hidden_size == target.hidden_size:
            return "target's"
    raise UserError(
        f"the EAGLE-3 head holds no lm_head.weight, and cannot borrow the target's: it scores {vocab.size} tokens of "
        f"width {model.hidden_size}, the target {target.vocab_size} of width {target.hidden_size}"
    )
