"""The layers of a finished model as the C call takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.engine.attention.torch import TorchAttention
from server.engine.cpu.stack import DecoderStack, LayerParts, StackParts, stack_problem
from server.engine.layers.mlp import GatedMLP
from server.engine.models.layer import DecoderLayer

if TYPE_CHECKING:
    from server.engine.models.decoder import CausalLM


def decoder_stack(model: CausalLM) -> DecoderStack | None:
    """One call for all layers; None where some are not packed, hold experts, or keep their cache otherwise."""
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    parts = [part for part in map(_parts, layers) if part is not None]
    attention = layers[0].self_attn
    if len(parts) != len(layers) or not isinstance(attention.backend, TorchAttention):
        return None
    stack = StackParts(
        layers=parts,
        embedding=model.ends.embed_tokens.weight,
        final_norm=model.norm.weight,
        inverse_frequency=model.rotary.inv,
        angle_scale=model.rotary.scale,
        eps=model.norm.eps,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        capture=tuple(model.capture),
    )
    return None if stack_problem(stack, attention.backend.need.kv_dtype) else DecoderStack(stack)


def _parts(layer: DecoderLayer) -> LayerParts | None:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, GatedMLP):
        return None
    qkv, output = attention.qkv_proj.coded, attention.o_proj.coded
    gate_up, down = mlp.gate_up_proj.coded, mlp.down_proj.coded
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    norms = None if attention.qk_norm is None else attention.qk_norm.weight
    return LayerParts(
        layer.input_layernorm.weight, layer.post_attention_layernorm.weight, norms, qkv, output, gate_up, down
    )
