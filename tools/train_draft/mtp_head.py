"""A multi-token prediction layer as it is trained, in GLM-4.5's layout; `server.engine.models.mtp` serves it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.models.config import ModelConfig
from tools.train_draft.batches import TrainingBatch
from tools.train_draft.chain_attention import ChainAttention, Past, RMSNorm, Window
from tools.train_draft.gated_mlp import GatedMLP, MixtureOfExperts
from tools.train_draft.target_weights import TargetWeights

_STREAM = 4.0
"""The size that the residual stream begins with, as a root mean square."""


@dataclass(frozen=True)
class FeedForward:
    """The part behind the attention."""

    width: int
    """Of an expert, or of the plain part."""
    experts: int = 0
    """0 for a plain part."""
    top_k: int = 1
    shared: int = 1
    """The shared expert is so many times as wide as the others."""


class MTPHead(nn.Module):
    """One decoder layer, with experts or without, that borrows the target's embedding and head."""

    method = "mtp"
    vocab: Tensor
    head: Tensor

    def __init__(self, target: ModelConfig, vocab: Tensor, shape: FeedForward) -> None:
        """Make the memory.

        Args:
            target: the model it drafts for.
            vocab: int64 [Vd], the ids whose logits are computed in training; all are when it is served.
            shape: of the part behind the attention.
        """
        super().__init__()
        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.target, self.shape = target, shape
        self.register_buffer("vocab", vocab)
        self.register_buffer("head", torch.empty(len(vocab), hidden), persistent=False)
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps)
        heads = (target.num_heads, target.num_kv_heads, target.head_dim)
        self.self_attn = ChainAttention(hidden, hidden, *heads, target.rope)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp: MixtureOfExperts | GatedMLP = GatedMLP(hidden, shape.width)
        if shape.experts:
            self.mlp = MixtureOfExperts(hidden, shape.width, shape.experts, shape.top_k, shape.shared)
        self.norm = RMSNorm(hidden, eps)

    @torch.no_grad()
    def start_from(self, weights: TargetWeights, batch: TrainingBatch) -> None:
        """Begin as the target's last layer over the residual stream that its final hidden state was made of.

        The shared expert is the first part of the target's feed-forward, the others are all its last part. What the
        target has no plain tensors for is left to chance.

        Args:
            weights: the target's.
            batch: to measure the size of the residual stream, where the last boundary was captured.
        """
        hidden = self.target.hidden_size
        last = f"model.layers.{self.target.num_layers - 1}."
        self.head.copy_(weights.head[self.vocab])
        norm = weights["model.norm.weight"]
        stream = batch.aux[..., -hidden:].float() if batch.aux.shape[-1] else torch.ones_like(batch.final).float()
        inside = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) < batch.lengths[:, None]
        # All is made smaller by one factor, which the norms do not see: or the token's embedding, which enters beside
        # the hidden state here, would need weights far larger than a learning rate reaches.
        smaller = _STREAM / _rms(stream[inside]).median().item()
        size = _STREAM * _rms(batch.final[inside].float()).median().item()
        self.eh_proj.weight[:, :hidden].normal_(std=0.02)
        self.eh_proj.weight[:, hidden:] = torch.diag(size * norm.sign() / norm.abs().clamp(min=0.3))
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(self.self_attn, name).weight.copy_(weights[f"{last}self_attn.{name}.weight"])
        self.self_attn.o_proj.weight.mul_(smaller)
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(self, name).weight.copy_(weights[f"{last}{name}.weight"])
        self.norm.weight.copy_(norm)
        for name in ("gate_proj", "up_proj", "down_proj"):
            dense = weights.get(f"{last}mlp.{name}.weight")
            if dense is None:
                continue
            dense = dense.mT * smaller if name == "down_proj" else dense
            parts = [self.mlp] if isinstance(self.mlp, GatedMLP) else [self.mlp.shared_experts, *self.mlp.experts]
            for number, part in enumerate(parts):
                weight = getattr(part, name).weight
                weight = weight.mT if name == "down_proj" else weight
                begin = 0 if number == 0 else max(0, len(dense) - self.shape.width)
                piece = dense[begin : begin + len(weight)]
                # Where a part is wider than the target's, the rest of it starts by chance.
                weight[: len(piece)] = piece
                if number:
                    # Alike, they would learn alike.
                    weight.add_(torch.randn_like(weight) * 0.1 * dense.std())

    def begin(self, batch: TrainingBatch) -> Tensor:
        """The hidden states of the first step, [B, L, H]."""
        return batch.final

    def step(self, hidden: Tensor, embedded: Tensor, window: Window, step: int, past: Past) -> tuple[Tensor, Tensor]:
        """See `Eagle3Head.step`."""
        stream = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        x = self.input_layernorm(stream)
        if step == 0:
            attended = self.self_attn(window.of(x), window, step, past, context=x)
            stream = window.of(stream)
        else:
            attended = self.self_attn(x, window, step, past)
        stream = stream + attended
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        output = self.norm(stream)
        return output, output

    def logits(self, output: Tensor) -> Tensor:
        """[R, H] of `step` -> [R, Vd], with the target's own head."""
        return F.linear(output, self.head)

    def after_step(self) -> None:
        """Even out the experts' load."""
        if isinstance(self.mlp, MixtureOfExperts):
            self.mlp.balance()

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's, behind the target's own layers."""
        prefix = f"model.layers.{self.target.num_layers}."
        out: dict[str, Tensor] = {}
        for name, tensor in self.named_parameters():
            renamed = f"shared_head.{name}" if name == "norm.weight" else name
            out[prefix + renamed] = tensor.detach().bfloat16()
        if isinstance(self.mlp, MixtureOfExperts):
            out[f"{prefix}mlp.gate.e_score_correction_bias"] = self.mlp.gate.e_score_correction_bias.float()
        return out

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint's config.json; `target` is the target's, of which it is a part."""
        if not self.shape.experts:
            return {**target, "num_nextn_predict_layers": 1}
        model = self.target
        shape: dict[str, Any] = {
            "vocab_size": model.vocab_size,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_layers,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "intermediate_size": model.intermediate_size,
            "max_position_embeddings": model.max_position_embeddings,
            "rms_norm_eps": model.rms_norm_eps,
            "tie_word_embeddings": model.tie_word_embeddings,
            "partial_rotary_factor": model.rope.rotary_dim / model.head_dim,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "attention_bias": False,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            "n_routed_experts": self.shape.experts,
            "num_experts_per_tok": self.shape.top_k,
            "n_shared_experts": self.shape.shared,
            "moe_intermediate_size": self.shape.width,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }
        kept = ("rope_theta", "rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id")
        return shape | {key: target[key] for key in kept if key in target}


def _rms(x: Tensor) -> Tensor:
    return x.square().mean(-1).sqrt()
