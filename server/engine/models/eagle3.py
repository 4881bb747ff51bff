"""EAGLE-3: a small head over hidden states from several depths of the target.

Li et al. 2025, arXiv 2503.01840; the options are those of the heads that SafeAILab, SpecForge, AngelSlim, modelopt and
speculators publish.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from server.engine.cpu.stack import DecoderStack
from server.engine.layers.context import BuildContext
from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear
from server.engine.layers.norm import RMSNorm
from server.engine.layers.rope import Angles, Rotary
from server.engine.models.decoder import count_parameters
from server.engine.models.draft import Borrowed, DraftHidden, TargetHidden, check_borrowed
from server.engine.models.eagle3_config import Eagle3Config
from server.engine.models.eagle3_names import canonical_name
from server.engine.models.finish import finish_layers
from server.engine.models.layer import DecoderLayer
from server.engine.models.stack_parts import eagle3_stack
from server.engine.quantization.format import UNQUANTIZED

_KEPT_ASIDE = frozenset({"d2t", "t2d"})
"""Read with the config: they are ids, not weights."""


class Eagle3FirstLayer(nn.Module):
    """A decoder layer whose attention reads the token's embedding beside the hidden state."""

    def __init__(self, config: Eagle3Config, context: BuildContext) -> None:
        super().__init__()
        model = config.model
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = RMSNorm(model.hidden_size, model.rms_norm_eps, context)
        within = context.under(config.file_module("layers.0"))
        self.layer = DecoderLayer(model, within, 0, attention_input=2 * model.hidden_size)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Angles, plan: Any) -> tuple[Tensor, Tensor]:
        """Both [T, H] and unchanged -> [T, H] and the residual stream that it is to be added to."""
        layer = self.layer
        normed = self.hidden_norm(hidden)[0]
        attended = layer.self_attn(torch.cat((layer.input_layernorm(embedded)[0], normed), -1), angles, plan)
        # The sum is written into the attention's output, so that the hidden state stays the caller's.
        x, residual = layer.post_attention_layernorm(normed if self.norm_before_residual else hidden, attended)
        return layer.mlp(x), residual

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under `prefix`, and the memory they fill."""
        return self.hidden_norm.weight_targets(f"{prefix}.hidden_norm") | self.layer.weight_targets(prefix)


class AuxNorm(nn.Module):
    """RMS norms over the captured hidden states, each by itself or all as one."""

    def __init__(self, size: int, eps: float, context: BuildContext, names: list[str]) -> None:
        super().__init__()
        self.names = names
        self.norms = nn.ModuleList(RMSNorm(size, eps, context) for _ in names)

    def forward(self, x: Tensor) -> Tensor:
        """[T, len(names) * size] -> the same."""
        return torch.cat(
            [norm(part)[0] for norm, part in zip(self.norms, x.chunk(len(self.names), -1), strict=True)], -1
        )

    def weight_targets(self) -> dict[str, Tensor]:
        """Checkpoint names, and the memory they fill."""
        targets: dict[str, Tensor] = {}
        for name, norm in zip(self.names, self.norms, strict=True):
            assert isinstance(norm, RMSNorm)
            targets |= norm.weight_targets(name)
        return targets


class Eagle3Draft(nn.Module):
    """A `RecurrentDraft`; all steps run the same layers."""

    def __init__(self, config: Eagle3Config, context: BuildContext, borrowed: Borrowed) -> None:
        """Make the memory.

        Args:
            config: the head's; its attention layers are 0 … `config.model.num_layers - 1` of the context's backend.
            context: dtype, device, backends and ranks, of the head.
            borrowed: the target's modules, used where the config says so.

        Raises:
            UserError: it borrows, and its dtype is not the target's.
        """
        super().__init__()
        model = config.model
        hidden, eps = model.hidden_size, model.rms_norm_eps
        self.config = config
        self.dtype = context.dtype
        ids = config.vocab.target_ids
        self.target_ids = None if ids is None else ids.to(context.device)
        self.rotary = Rotary(model.rope, context.dtype, context.device)
        captured = len(config.capture)
        self.fc = None
        if captured:
            inputs = captured * config.target_hidden_size
            stored = context.weight_format([config.file_module("fc")])
            self.fc = Linear(inputs, {"fc": hidden}, context, bias=config.fc_bias, weight_format=stored)
        self.aux_norm = _aux_norm(config, context) if captured else None
        self.first = Eagle3FirstLayer(config, context)
        self.later = nn.ModuleList(
            DecoderLayer(model, context.under(config.file_module(f"layers.{index}")), index)
            for index in range(1, model.num_layers)
        )
        self.norm = RMSNorm(hidden, eps, context)
        self.embed_tokens = None
        if config.embedding == "own":
            self.embed_tokens = VocabEmbedding(model.vocab_size, hidden, context)
        self.lm_head = None
        if config.head != "target's":
            tied = self.embed_tokens if config.head == "embedding's" else None
            stored = UNQUANTIZED if tied is not None else context.weight_format([config.file_module("lm_head")])
            head = {"lm_head": config.vocab.size}
            self.lm_head = Linear(hidden, head, context, tied=tied, weight_format=stored)
        self.formats = context.formats
        self.num_parameters = count_parameters(self)
        """Its own."""
        if self.embed_tokens is None or self.lm_head is None:
            check_borrowed(borrowed, context)
        # Not as attributes of their own: that would make the target's modules this one's.
        self.ends = Borrowed(self.embed_tokens or borrowed.embed_tokens, self.lm_head or borrowed.lm_head)
        self.stack: DecoderStack | None = None
        """The layers as one call, where they are packed for it."""

    def combine(self, target: TargetHidden) -> Tensor:
        """`fc` of the captured hidden states, [T, H]."""
        if self.fc is None:
            return target.final.to(self.dtype)
        if target.aux is None:
            raise ValueError("the target was built without capture")
        aux = target.aux.to(self.dtype)
        combined: Tensor = self.fc(aux if self.aux_norm is None else self.aux_norm(aux))
        return combined

    def forward(self, hidden: Tensor, input_ids: Tensor, positions: Tensor, plan: Any, step: int) -> DraftHidden:
        """See `RecurrentDraft`; all steps are alike."""
        angles = self.rotary(positions)
        x, residual = self.first(self.ends.embed_tokens(input_ids), hidden, angles, plan)
        for layer in self.later:
            x, residual = layer(x, residual, angles, plan)
        output, stream = self.norm(x, residual)
        return DraftHidden(output, output if self.config.norm_output else stream)

    def logits(self, output: Tensor) -> Tensor:
        """See `RecurrentDraft`."""
        out: Tensor = self.ends.lm_head(output)
        return out

    def highest(self, output: Tensor, vocab_size: int) -> Tensor:
        """See `RecurrentDraft`."""
        ids = self.target_ids
        found = self.ends.lm_head.highest(output, self.config.vocab.size if ids is not None else vocab_size)
        return found if ids is None else ids[found]

    def weight_targets(self) -> dict[str, Tensor]:
        """See `RecurrentDraft`."""
        targets = self.first.weight_targets("layers.0") | self.norm.weight_targets("norm")
        for index, layer in enumerate(self.later, 1):
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"layers.{index}")
        for part in (self.fc, self.lm_head if self.config.head == "own" else None):
            targets |= part.weight_targets("") if part is not None else {}
        if self.aux_norm is not None:
            targets |= self.aux_norm.weight_targets()
        if self.embed_tokens is not None:
            targets |= self.embed_tokens.weight_targets("embed_tokens")
        return {self.config.names.get(name, name): target for name, target in targets.items()}

    def ignored_weight(self, name: str) -> bool:
        """The vocabulary maps, which are read with the config, rotary tables, scales of activations and caches."""
        if canonical_name(name) in _KEPT_ASIDE or name.endswith("rotary_emb.inv_freq"):
            return True
        return self.formats.leaves_aside(name)

    def finish_loading(self) -> None:
        """See `RecurrentDraft`."""
        finish_layers(self)
        self.stack = eagle3_stack(self)


def _aux_norm(config: Eagle3Config, context: BuildContext) -> AuxNorm | None:
    count, size, eps = len(config.capture), config.target_hidden_size, config.model.rms_norm_eps
    if config.aux_norm == "chunks":
        return AuxNorm(size, eps, context, [f"fc_norm.{i}" for i in range(count)])
    if config.aux_norm == "whole":
        return AuxNorm(count * size, eps, context, ["input_norm"])
    return None
