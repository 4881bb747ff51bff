"""Multi-token prediction layers: the model's own draft (DeepSeek-V3, arXiv 2412.19437, section 2.2; GLM-4.5)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from server.engine.layers.context import BuildContext
from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear
from server.engine.layers.norm import RMSNorm
from server.engine.layers.rope import Angles, Rotary
from server.engine.models.decoder import count_parameters
from server.engine.models.draft import Borrowed, DraftHidden, TargetHidden, check_borrowed
from server.engine.models.finish import finish_layers
from server.engine.models.layer import DecoderLayer
from server.engine.models.mtp_config import MTPConfig
from server.engine.models.nextn_names import EMBEDDING, HEAD, LAYER

_TARGETS_OWN = ("model.embed_tokens", "model.norm", "lm_head")


class MTPLayer(nn.Module):
    """One whole decoder layer behind a projection of the token's embedding and the hidden state."""

    def __init__(self, config: MTPConfig, context: BuildContext, index: int) -> None:
        super().__init__()
        model = config.model
        hidden, eps = model.hidden_size, model.rms_norm_eps
        self.enorm = RMSNorm(hidden, eps, context)
        self.hnorm = RMSNorm(hidden, eps, context)
        within = context.under(f"model.layers.{config.first + index}")
        self.eh_proj = Linear(2 * hidden, {"eh_proj": hidden}, within, weight_format=within.weight_format(["eh_proj"]))
        self.layer = DecoderLayer(model, within, index)
        self.norm = RMSNorm(hidden, eps, context)

    def forward(self, embedded: Tensor, hidden: Tensor, angles: Angles, plan: Any) -> Tensor:
        """Both [T, H] and unchanged -> [T, H], after the layer's final norm."""
        x, residual = self.layer(self._project(embedded, hidden), None, angles, plan)
        out: Tensor = self.norm(x, residual)[0]
        return out

    def store(self, embedded: Tensor, hidden: Tensor, angles: Angles, plan: Any) -> None:
        """Only what a later step needs of these tokens: their keys and values."""
        x = self.layer.input_layernorm(self._project(embedded, hidden))[0]
        self.layer.self_attn(x, angles, plan)

    def _project(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        projected: Tensor = self.eh_proj(torch.cat((self.enorm(embedded)[0], self.hnorm(hidden)[0]), -1))
        return projected

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under `prefix`, and the memory they fill."""
        return (
            self.enorm.weight_targets(f"{prefix}.enorm")
            | self.hnorm.weight_targets(f"{prefix}.hnorm")
            | self.eh_proj.weight_targets(f"{prefix}.")
            | self.layer.weight_targets(prefix)
            | self.norm.weight_targets(f"{prefix}.shared_head.norm")
        )


class MTPDraft(nn.Module):
    """A `RecurrentDraft`: step j runs layer j, or the last one where there are fewer.

    The layers share the first one's embedding and head, which are copies of the target's.

    With several layers, each step also gives its slots' keys and values to the layers that only later steps run, made
    from the same hidden states: so every layer sees the whole context. It is not quite the context of the training,
    where layer k read the outputs of layer k - 1, one position further; those of cached or earlier tokens are
    not kept. With one layer, as all published checkpoints of these families have, there is no difference.
    """

    def __init__(self, config: MTPConfig, context: BuildContext, borrowed: Borrowed) -> None:
        """Make the memory.

        Args:
            config: the layers'; their attention is 0 … `config.model.num_layers - 1` of the context's backend.
            context: dtype, device, backends and ranks, of the draft.
            borrowed: the target's modules, used where the checkpoint holds no copy.

        Raises:
            UserError: it borrows, and its dtype is not the target's.
        """
        super().__init__()
        model = config.model
        self.config = config
        self.dtype = context.dtype
        self.target_ids: Tensor | None = None
        self.rotary = Rotary(model.rope, context.dtype, context.device)
        self.layers = nn.ModuleList(MTPLayer(config, context, index) for index in range(model.num_layers))
        self.embed_tokens = None
        if config.embedding is not None:
            self.embed_tokens = VocabEmbedding(model.vocab_size, model.hidden_size, context)
        self.lm_head = None
        if config.head is not None:
            stored = context.weight_format([config.head.removesuffix(".weight")])
            self.lm_head = Linear(model.hidden_size, {"head": model.vocab_size}, context, weight_format=stored)
        self.formats = context.formats
        self.num_parameters = count_parameters(self)
        """Its own."""
        if self.embed_tokens is None or self.lm_head is None:
            check_borrowed(borrowed, context)
        # Not as attributes of their own: that would make the target's modules this one's.
        self._ends = Borrowed(self.embed_tokens or borrowed.embed_tokens, self.lm_head or borrowed.lm_head)

    def combine(self, target: TargetHidden) -> Tensor:
        """The target's final hidden states, [T, H]."""
        return target.final.to(self.dtype)

    def forward(self, hidden: Tensor, input_ids: Tensor, positions: Tensor, plan: Any, step: int) -> DraftHidden:
        """See `RecurrentDraft`."""
        angles = self.rotary(positions)
        embedded = self._ends.embed_tokens(input_ids)
        running = min(step, len(self.layers) - 1)
        for layer in self.layers[running + 1 :]:
            assert isinstance(layer, MTPLayer)
            layer.store(embedded, hidden, angles, plan)
        output: Tensor = self.layers[running](embedded, hidden, angles, plan)
        # Recycled after the norm: before it, hidden states drift and later drafts fail.
        return DraftHidden(output, output)

    def logits(self, output: Tensor) -> Tensor:
        """See `RecurrentDraft`."""
        out: Tensor = self._ends.lm_head(output)
        return out

    def highest(self, output: Tensor, vocab_size: int) -> Tensor:
        """See `RecurrentDraft`."""
        return self._ends.lm_head.highest(output, vocab_size)

    def weight_targets(self) -> dict[str, Tensor]:
        """See `RecurrentDraft`."""
        targets: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers, self.config.first):
            assert isinstance(layer, MTPLayer)
            targets |= layer.weight_targets(f"model.layers.{index}")
        if self.config.embedding is not None and self.embed_tokens is not None:
            targets[self.config.embedding] = self.embed_tokens.weight
        if self.config.head is not None and self.lm_head is not None:
            module = self.config.head.removesuffix(".weight")
            for name, memory in self.lm_head.weight_targets("").items():
                targets[module + name.removeprefix("head")] = memory
        return targets

    def ignored_weight(self, name: str) -> bool:
        """The target's tensors, later layers' copies of embedding and head, rotary tables, scales of activations."""
        if (
            name.rpartition(".")[0] in _TARGETS_OWN
            or name.endswith(".rotary_emb.inv_freq")
            or self.formats.leaves_aside(name)
        ):
            return True
        match = LAYER.fullmatch(name)
        if match is None:
            return False
        index, part = int(match[1]), match[2]
        first = self.config.first
        if index < first:
            return self.config.embedded
        later = first < index < first + len(self.layers)
        return later and f"{part.rpartition('.')[0]}.weight" in (EMBEDDING, HEAD)

    def finish_loading(self) -> None:
        """See `RecurrentDraft`."""
        finish_layers(self)
