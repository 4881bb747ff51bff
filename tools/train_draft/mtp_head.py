"""A multi-token prediction layer as it is trained, in GLM-4.5's layout; `server.engine.models.mtp` serves it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.models.config import ModelConfig
from tools.train_draft.batches import TrainingBatch
from tools.train_draft.chain_attention import ChainAttention, Past, RMSNorm, Window
from tools.train_draft.gated_mlp import GatedMLP, MixtureOfExperts
from tools.train_draft.target_weights import TargetWeights


class MTPHead(nn.Module):
    """One decoder layer, with experts or without, that borrows the target's embedding and head."""

    method = "mtp"
    vocab: Tensor
    head: Tensor

    def __init__(self, target: ModelConfig, vocab: Tensor, experts: int, top_k: int, width: int) -> None:
        """Make the memory.

        Args:
            target: the model it drafts for.
            vocab: int64 [Vd], the ids whose logits are computed in training; all are when it is served.
            experts: of the layer; 0 for a plain feed-forward part.
            top_k: experts a token goes to.
            width: of an expert, or of the feed-forward part.
        """
        super().__init__()
        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.target, self.experts, self.top_k, self.width = target, experts, top_k, width
        self.register_buffer("vocab", vocab)
        self.register_buffer("head", torch.empty(len(vocab), hidden), persistent=False)
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps)
        heads = (target.num_heads, target.num_kv_heads, target.head_dim)
        self.self_attn = ChainAttention(hidden, hidden, *heads, target.rope)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = MixtureOfExperts(hidden, width, experts, top_k) if experts else GatedMLP(hidden, width)
        self.norm = RMSNorm(hidden, eps)

    @torch.no_grad()
    def start_from(self, weights: TargetWeights) -> None:
        """Begin as the target's last layer over its final hidden state; each expert is a slice of its feed-forward."""
        hidden = self.target.hidden_size
        last = f"model.layers.{self.target.num_layers - 1}."
        self.head.copy_(weights.head[self.vocab])
        self.eh_proj.weight[:, :hidden].normal_(std=0.01)
        self.eh_proj.weight[:, hidden:] = torch.eye(hidden)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(self.self_attn, name).weight.copy_(weights[f"{last}self_attn.{name}.weight"])
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(self, name).weight.copy_(weights[f"{last}{name}.weight"])
        self.norm.weight.copy_(weights["model.norm.weight"])
        parts = [self.mlp] if isinstance(self.mlp, GatedMLP) else [*self.mlp.experts, self.mlp.shared_experts]
        for number, part in enumerate(parts):
            assert isinstance(part, GatedMLP)
            for name in ("gate_proj", "up_proj", "down_proj"):
                dense = weights.get(f"{last}mlp.{name}.weight")
                if dense is None:
                    continue
                width = dense.shape[1] if name == "down_proj" else dense.shape[0]
                chosen = torch.arange(number * self.width, (number + 1) * self.width) % width
                getattr(part, name).weight.copy_(dense[:, chosen] if name == "down_proj" else dense[chosen])

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
        if not self.experts:
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
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "n_shared_experts": 1,
            "moe_intermediate_size": self.width,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }
        kept = ("rope_theta", "rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id")
        return shape | {key: target[key] for key in kept if key in target}
