"""An EAGLE-3 head (arXiv 2503.01840) as it is trained; `server.engine.models.eagle3` serves it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from server.engine.models.config import ModelConfig
from tools.train_draft.batches import TrainingBatch
from tools.train_draft.chain_attention import ChainAttention, Past, RMSNorm, Window
from tools.train_draft.gated_mlp import GatedMLP
from tools.train_draft.target_weights import TargetWeights


class Eagle3Head(nn.Module):
    """One layer over the hidden states of some of the target's layers, with a vocabulary of its own."""

    method = "eagle3"
    vocab: Tensor

    def __init__(self, target: ModelConfig, boundaries: tuple[int, ...], vocab: Tensor) -> None:
        """Make the memory.

        Args:
            target: the model it drafts for; the head's layer has the same shape.
            boundaries: the captured layer boundaries.
            vocab: int64 [Vd], the ids that it scores, rising.
        """
        super().__init__()
        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.target, self.boundaries = target, boundaries
        self.register_buffer("vocab", vocab)
        self.fc = nn.Linear(len(boundaries) * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        heads = (target.num_heads, target.num_kv_heads, target.head_dim)
        self.self_attn = ChainAttention(2 * hidden, hidden, *heads, target.rope)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = GatedMLP(hidden, target.intermediate_size)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, len(vocab), bias=False)

    @torch.no_grad()
    def start_from(self, weights: TargetWeights, batch: TrainingBatch) -> None:
        """Begin as the target's last layer over its highest captured hidden state; see `MTPHead.start_from`."""
        hidden = self.target.hidden_size
        last = f"model.layers.{self.target.num_layers - 1}."
        self.fc.weight.zero_()
        self.fc.weight[:, -hidden:] = torch.eye(hidden)
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = getattr(self.self_attn, name).weight
            projection[:, :hidden].normal_(std=0.01)
            projection[:, hidden:] = weights[f"{last}self_attn.{name}.weight"]
        self.self_attn.o_proj.weight.copy_(weights[f"{last}self_attn.o_proj.weight"])
        self.hidden_norm.weight.copy_(weights[f"{last}input_layernorm.weight"])
        # Embeddings are used at the size that they have beside normalised hidden states.
        self.post_attention_layernorm.weight.copy_(weights[f"{last}post_attention_layernorm.weight"])
        for name in ("gate_proj", "up_proj", "down_proj"):
            getattr(self.mlp, name).weight.copy_(weights[f"{last}mlp.{name}.weight"])
        self.norm.weight.copy_(weights["model.norm.weight"])
        self.lm_head.weight.copy_(weights.head[self.vocab])

    def begin(self, batch: TrainingBatch) -> Tensor:
        """The hidden states of the first step, [B, L, H]."""
        out: Tensor = self.fc(batch.aux)
        return out

    def step(self, hidden: Tensor, embedded: Tensor, window: Window, step: int, past: Past) -> tuple[Tensor, Tensor]:
        """Run one step.

        Args:
            hidden: by anchor [B, A, H]; of all positions [B, L, H] in step 0.
            embedded: likewise, of the token after each slot.
            window: the anchors.
            step: 0, 1, …
            past: of the earlier steps; this one's is added.

        Returns:
            What the logits are made of, and the next step's hidden states, both [B, A, H].
        """
        x = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        if step == 0:
            attended = self.self_attn(window.of(x), window, step, past, context=x)
            hidden = window.of(hidden)
        else:
            attended = self.self_attn(x, window, step, past)
        stream = hidden + attended
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        return stream, stream

    def logits(self, output: Tensor) -> Tensor:
        """[R, H] of `step` -> [R, Vd]."""
        return F.linear(self.norm(output), self.lm_head.weight)

    def after_step(self) -> None:
        """Nothing to do after a step of the optimiser."""

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint's, by the names that EAGLE's own heads have."""
        layer = ("input_layernorm", "hidden_norm", "self_attn", "post_attention_layernorm", "mlp")
        out: dict[str, Tensor] = {}
        for name, tensor in self.named_parameters():
            out[f"midlayer.{name}" if name.split(".")[0] in layer else name] = tensor.detach().bfloat16()
        out["d2t"] = self.vocab - torch.arange(len(self.vocab), device=self.vocab.device)
        mask = torch.zeros(self.target.vocab_size, dtype=torch.bool, device=self.vocab.device)
        mask[self.vocab] = True
        out["t2d"] = mask
        return out

    def config(self, target: dict[str, Any]) -> dict[str, Any]:
        """The checkpoint's config.json; `target` is the target's."""
        model = self.target
        kept = ("rope_theta", "rope_scaling", "rope_parameters", "bos_token_id", "eos_token_id", "rms_norm_eps")
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "torch_dtype": "bfloat16",
            "hidden_act": "silu",
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": model.num_heads,
            "num_key_value_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": model.max_position_embeddings,
            "vocab_size": model.vocab_size,
            "draft_vocab_size": len(self.vocab),
            "tie_word_embeddings": False,
            "norm_before_residual": False,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.boundaries),
                "use_aux_hidden_state": True,
            },
        } | {key: target[key] for key in kept if key in target}
