"""The layers of a finished model as the C call takes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from server.engine.attention.torch import TorchAttention
from server.engine.cpu.stack import DecoderStack, LayerParts, StackParts, stack_problem
from server.engine.layers.mlp import GatedMLP
from server.engine.layers.norm import RMSNorm
from server.engine.layers.rope import Rotary
from server.engine.models.layer import DecoderLayer

if TYPE_CHECKING:
    from server.engine.models.decoder import CausalLM
    from server.engine.models.eagle3 import Eagle3Draft


def decoder_stack(model: CausalLM) -> DecoderStack | None:
    """One call for all layers; None where some are not packed, hold experts, or keep their cache otherwise."""
    layers = [layer for layer in model.layers if isinstance(layer, DecoderLayer)]
    parts = _parts(layers, [layer.input_layernorm for layer in layers])
    embedding = model.ends.embed_tokens.weight
    stack = _stack(layers, parts, embedding, model.norm, model.rotary, model.capture)
    return _built(stack, layers)


def eagle3_stack(model: Eagle3Draft) -> DecoderStack | None:
    """The same for a head; what it captures is the residual stream behind its last layer."""
    first = model.first
    later = [layer for layer in model.later if isinstance(layer, DecoderLayer)]
    layers = [first.layer, *later]
    parts = _parts(layers, [first.hidden_norm, *(layer.input_layernorm for layer in later)])
    embedding = model.ends.embed_tokens.weight
    stack = _stack(layers, parts, embedding, model.norm, model.rotary, (len(layers),))
    if stack is not None:
        norm = first.layer.input_layernorm.weight
        stack = replace(stack, embedding_norm=norm, begins_normed=first.norm_before_residual)
    return _built(stack, layers)


def _stack(
    layers: Sequence[DecoderLayer],
    parts: Sequence[LayerParts] | None,
    embedding: Tensor,
    final_norm: RMSNorm,
    rotary: Rotary,
    capture: Iterable[int],
) -> StackParts | None:
    if parts is None:
        return None
    attention = layers[0].self_attn
    return StackParts(
        layers=parts,
        embedding=embedding,
        embedding_norm=None,
        begins_normed=False,
        final_norm=final_norm.weight,
        inverse_frequency=rotary.inv,
        angle_scale=rotary.scale,
        eps=final_norm.eps,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        capture=tuple(capture),
    )


def _built(stack: StackParts | None, layers: Sequence[DecoderLayer]) -> DecoderStack | None:
    backend = layers[0].self_attn.backend
    if stack is None or not isinstance(backend, TorchAttention) or stack_problem(stack, backend.need.kv_dtype):
        return None
    return DecoderStack(stack)


def _parts(layers: Sequence[DecoderLayer], input_norms: Sequence[RMSNorm]) -> list[LayerParts] | None:
    """Of all layers; None if one of them is not packed."""
    parts: list[LayerParts] = []
    for layer, norm in zip(layers, input_norms, strict=True):
        attention, mlp = layer.self_attn, layer.mlp
        if not isinstance(mlp, GatedMLP):
            return None
        qkv, output = attention.qkv_proj.coded, attention.o_proj.coded
        gate_up, down = mlp.gate_up_proj.coded, mlp.down_proj.coded
        if qkv is None or output is None or gate_up is None or down is None:
            return None
        norms = None if attention.qk_norm is None else attention.qk_norm.weight
        post_norm = layer.post_attention_layernorm.weight
        parts.append(LayerParts(norm.weight, post_norm, norms, qkv, output, gate_up, down))
    return parts
