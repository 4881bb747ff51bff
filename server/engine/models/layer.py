"""The decoder layer, put together as a config says."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from server.engine.layers.attention import Attention
from server.engine.layers.context import BuildContext
from server.engine.layers.mlp import GatedMLP
from server.engine.layers.moe import Experts, MoEBlock
from server.engine.layers.norm import RMSNorm
from server.engine.layers.rope import Angles
from server.engine.layers.router import SigmoidRouter, SoftmaxRouter
from server.engine.models.config import ModelConfig
from server.engine.models.family import MoEConfig


class DecoderLayer(nn.Module):
    """Norm, attention, norm, feed-forward; the residual stream travels beside the output."""

    def __init__(
        self, config: ModelConfig, context: BuildContext, index: int, *, attention_input: int | None = None
    ) -> None:
        """Make the memory.

        Args:
            config: the model's.
            context: dtype, device, backends, ranks and formats; its prefix is where the layer lies.
            index: this layer's; also its attention's place in the backend.
            attention_input: width of the attention's input where it is not the hidden size (EAGLE-3's first layer).
        """
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.self_attn = Attention(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            index,
            context.under("self_attn"),
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            input_size=attention_input,
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.mlp: GatedMLP | MoEBlock
        if config.moe is not None and index in config.moe.layers:
            self.mlp = moe_block(config.hidden_size, config.moe, context.under("mlp"))
        else:
            self.mlp = GatedMLP(
                config.hidden_size, config.intermediate_size, context.under("mlp"), bias=config.mlp_bias
            )

    def forward(self, x: Tensor, residual: Tensor | None, angles: Angles, plan: Any) -> tuple[Tensor, Tensor]:
        """[T, H] and the residual stream [T, H] it is to be added to (None at the start) -> the same two."""
        x, residual = self.input_layernorm(x, residual)
        x = self.self_attn(x, angles, plan)
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x), residual

    def weight_targets(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint names under `prefix`, and the memory they fill."""
        return (
            self.input_layernorm.weight_targets(f"{prefix}.input_layernorm")
            | self.self_attn.weight_targets(f"{prefix}.self_attn")
            | self.post_attention_layernorm.weight_targets(f"{prefix}.post_attention_layernorm")
            | self.mlp.weight_targets(f"{prefix}.mlp")
        )


def moe_block(hidden_size: int, moe: MoEConfig, context: BuildContext) -> MoEBlock:
    """Router, experts and shared expert of one layer."""
    router: SoftmaxRouter | SigmoidRouter
    if moe.scoring == "softmax":
        router = SoftmaxRouter(hidden_size, moe.num_experts, moe.top_k, context, renormalize=moe.renormalize)
    else:
        router = SigmoidRouter(
            hidden_size,
            moe.num_experts,
            moe.top_k,
            context,
            renormalize=moe.renormalize,
            scaling_factor=moe.routed_scaling_factor,
            num_groups=moe.num_groups,
            topk_groups=moe.topk_groups,
        )
    experts = Experts(hidden_size, moe.intermediate_size, moe.num_experts, moe.top_k, context.under("experts"))
    shared = None
    if moe.shared_intermediate_size:
        shared = GatedMLP(hidden_size, moe.shared_intermediate_size, context.under("shared_experts"))
    return MoEBlock(router, experts, shared)
