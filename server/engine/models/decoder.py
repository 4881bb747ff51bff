"""The decoder-only model: embedding, layers, final norm, head."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, nn

from server.engine.layers.context import BuildContext
from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear
from server.engine.layers.moe import Experts
from server.engine.layers.norm import QueryKeyNorm, RMSNorm
from server.engine.layers.rope import Rotary
from server.engine.models.config import ModelConfig
from server.engine.models.layer import DecoderLayer
from server.errors import UserError

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class CausalLM(nn.Module):
    """One model; usable after its targets are filled and `finish_loading` has run."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, context)
        self.rotary = Rotary(config.rope, context.dtype, context.device)
        self.layers = nn.ModuleList(DecoderLayer(config, context, index) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        shared = self.embed_tokens.weight if config.tie_word_embeddings else None
        self.lm_head = Linear(config.hidden_size, {"lm_head": config.vocab_size}, context, weight=shared)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        """Counted before the weights are packed; tied ones once."""

    def forward(self, input_ids: Tensor, positions: Tensor, plan: Any) -> Tensor:
        """The hidden states after the final norm.

        Args:
            input_ids: int64 [T], the new tokens of all rows of the step.
            positions: int64 [T], each token's position in its sequence.
            plan: what the attention backend planned for the step.

        Returns:
            [T, H] in the model's dtype.
        """
        x = self.embed_tokens(input_ids)
        angles = self.rotary(positions)
        residual = None
        for layer in self.layers:
            x, residual = layer(x, residual, angles, plan)
        hidden: Tensor = self.norm(x, residual)[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] from `forward` -> [R, V] in the model's dtype."""
        out: Tensor = self.lm_head(hidden)
        return out

    def weight_targets(self) -> dict[str, Tensor]:
        """Checkpoint name -> the view of parameter memory that it fills; the view's shape is the expected one."""
        targets = self.embed_tokens.weight_targets("model.embed_tokens")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            targets |= layer.weight_targets(f"model.layers.{index}")
        targets |= self.norm.weight_targets("model.norm")
        if not self.config.tie_word_embeddings:
            targets |= self.lm_head.weight_targets("")
        return targets

    def ignored_weight(self, name: str) -> bool:
        """Whether a tensor of the checkpoint is left aside on purpose.

        These are a head that equals the tied embedding, rotary tables, and MTP layers, which belong to the draft.
        """
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings
        if name.endswith(".rotary_emb.inv_freq"):
            return True
        layer = _LAYER.match(name)
        first = self.config.num_layers
        return layer is not None and first <= int(layer[1]) < first + self.config.num_nextn_predict_layers

    def finish_loading(self) -> None:
        """Bring the filled weights into the layouts that the layers compute with; call it once."""
        for module in self.modules():
            if isinstance(module, Linear | Experts | QueryKeyNorm):
                module.finish_loading()


def build_model(config: ModelConfig, context: BuildContext) -> CausalLM:
    """Allocate a model; its memory is not initialised.

    Raises:
        UserError: more than one rank, which the layers can describe but not yet compute.
    """
    if context.group.size != 1:
        raise UserError(f"tensor_parallel_size = {context.group.size} is not supported; it must be 1")
    return CausalLM(config, context)
