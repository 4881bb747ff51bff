"""The decoder-only model: embedding, layers, final norm, head."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from server.engine.cpu.stack import DecoderStack
from server.engine.layers.context import BuildContext
from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear
from server.engine.layers.moe import Experts
from server.engine.layers.norm import RMSNorm
from server.engine.layers.rope import Rotary
from server.engine.models.config import ModelConfig
from server.engine.models.draft import Borrowed, TargetHidden
from server.engine.models.finish import finish_layers
from server.engine.models.layer import DecoderLayer
from server.engine.models.stack_parts import decoder_stack
from server.engine.quantization.format import UNQUANTIZED
from server.errors import UserError

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class CausalLM(nn.Module):
    """One model; usable after its targets are filled and `finish_loading` has run."""

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        capture: Sequence[int] = (),
        lent: Borrowed | None = None,
    ) -> None:
        """Make the memory.

        Args:
            config: the model's.
            context: dtype, device, backends, ranks and formats.
            capture: layer boundaries whose residual stream a draft reads: i is the input of layer i, `num_layers` what
                the last layer leaves. They rise.
            lent: the target's ends, of which a draft uses those that its config says it lacks.
        """
        super().__init__()
        self.config = config
        self.capture = {boundary: place for place, boundary in enumerate(capture)}
        self.embed_tokens = None
        tied = config.own_head and config.tie_word_embeddings
        # How an embedding is stored only matters to a head that shares it.
        stored = context.weight_format(["lm_head"]) if tied and config.own_embedding else UNQUANTIZED
        if config.own_embedding:
            self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, context, stored)
        embedding = self.embed_tokens or lender(lent).embed_tokens
        self.rotary = Rotary(config.rope, context.dtype, context.device)
        self.layers = nn.ModuleList(
            DecoderLayer(config, context.under(f"model.layers.{index}"), index) for index in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.lm_head = None
        if config.own_head:
            self.lm_head = Linear(
                config.hidden_size,
                {"lm_head": config.vocab_size},
                context,
                tied=embedding if tied else None,
                weight_format=stored if tied else context.weight_format(["lm_head"]),
            )
        # Not as attributes of their own: that would make the target's modules this one's.
        self.ends = Borrowed(embedding, self.lm_head or lender(lent).lm_head)
        """What it embeds and scores with, its own or lent."""
        self.formats = context.formats
        self.num_parameters = count_parameters(self)
        """Counted before the weights are packed; tied ones once."""
        self.stack: DecoderStack | None = None
        """The layers as one call, where they are packed for it."""

    def forward(self, input_ids: Tensor, positions: Tensor, plan: Any) -> TargetHidden:
        """The hidden states after the final norm, and those that are captured on the way.

        Args:
            input_ids: int64 [T], the new tokens of all rows of the step.
            positions: int64 [T], each token's position in its sequence.
            plan: what the attention backend planned for the step.

        Returns:
            Both in the model's dtype.
        """
        x = self.ends.embed_tokens(input_ids)
        angles = self.rotary(positions)
        residual = None
        aux = x.new_empty(len(x), len(self.capture) * self.config.hidden_size) if self.capture else None
        for index, layer in enumerate(self.layers):
            self._capture(index, x, residual, aux)
            x, residual = layer(x, residual, angles, plan)
        self._capture(len(self.layers), x, residual, aux)
        return TargetHidden(self.norm(x, residual)[0], aux)

    def _capture(self, boundary: int, x: Tensor, residual: Tensor | None, aux: Tensor | None) -> None:
        """Write the residual stream of a captured boundary; the layers go on to change it in place."""
        place = self.capture.get(boundary)
        if place is None or aux is None:
            return
        chunk = aux[:, place * x.shape[1] : (place + 1) * x.shape[1]]
        if residual is None:
            chunk.copy_(x)
        else:
            torch.add(x, residual, out=chunk)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] from `forward` -> [R, V] in the model's dtype; float32 from a packed head, which adds up in it."""
        return self.ends.lm_head.scores(hidden)

    def best(self, hidden: Tensor, vocab_size: int) -> Tensor | None:
        """The most probable of the first ids for each row, int64 [R]; None where it takes `logits` to know."""
        return self.ends.lm_head.best(hidden, vocab_size)

    def highest(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """The most probable of the first ids for each row, int64 [R]."""
        return self.ends.lm_head.highest(hidden, vocab_size)

    def weight_targets(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view of parameter memory that it fills; the view's shape is the expected one."""
        targets = self.embed_tokens.weight_targets("model.embed_tokens") if self.embed_tokens is not None else {}
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"model.layers.{index}")
        targets |= self.norm.weight_targets("model.norm")
        if self.lm_head is not None and not self.config.tie_word_embeddings:
            targets |= self.lm_head.weight_targets("")
        return targets

    def ignored_weight(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is left aside on purpose.

        These are a head that equals the tied embedding, rotary tables, scales of activations and of the KV cache, and
        MTP layers, which belong to the draft.
        """
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        if name.endswith(".rotary_emb.inv_freq") or self.formats.leaves_aside(name):
            return True
        layer = _LAYER.match(name)
        first = self.config.num_layers
        return layer is not None and first <= int(layer[1]) < first + self.config.num_nextn_predict_layers

    def finish_loading(self) -> None:
        """Bring the filled weights into the layouts that the layers compute with; call it once."""
        finish_layers(self)
        self.stack = decoder_stack(self)


def count_parameters(model: nn.Module) -> int:
    """The numbers in a model that is not loaded yet: tied ones once, quantised ones as many as they stand for."""
    plain = sum(parameter.numel() for parameter in model.parameters())
    quantized = 0
    for module in model.modules():
        if isinstance(module, Linear):
            quantized += sum(stored.num_weights for stored in module.quantized.values())
        elif isinstance(module, Experts) and module.quantized is not None:
            quantized += module.quantized.gate_up.num_weights + module.quantized.down.num_weights
    return plain + quantized


def lender(lent: Borrowed | None) -> Borrowed:
    """The ends to borrow.

    Raises:
        ValueError: there is nobody to lend them.
    """
    if lent is None:
        raise ValueError("only a draft has a target to borrow from")
    return lent


def build_model(
    config: ModelConfig, context: BuildContext, capture: Sequence[int] = (), lent: Borrowed | None = None
) -> CausalLM:
    """Allocate a model; its memory is not initialised.

    Args:
        config: the model's.
        context: dtype, device, backends and ranks.
        capture: see `CausalLM`.
        lent: see `CausalLM`.

    Raises:
        UserError: more than one rank, which the layers can describe but not yet compute.
    """
    if context.group.size != 1:
        raise UserError(f"tensor_parallel_size = {context.group.size} is not supported; it must be 1")
    return CausalLM(config, context, capture, lent)
