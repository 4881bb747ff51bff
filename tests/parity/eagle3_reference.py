"""EAGLE-3's arithmetic written out: dense attention over all slots, fp64, nothing shared with the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Eagle3Reference:
    """One head; `tensors` in fp64 under the names of SpecForge's files, `midlayer` written as `layers.0`."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]
    theta: float = 10000.0

    def combine(self, aux: Tensor) -> Tensor:
        """[T, n * Ht] -> [T, Hd]."""
        chunks = aux.double()
        width = self["fc.weight"].shape[1]
        if "fc_norm.0.weight" in self.tensors:
            size = len(self["fc_norm.0.weight"])
            parts = [self._norm(f"fc_norm.{i}", chunks[:, i * size : (i + 1) * size]) for i in range(width // size)]
            chunks = torch.cat(parts, 1)
        if "input_norm.weight" in self.tensors:
            chunks = self._norm("input_norm", chunks)
        combined = chunks @ self["fc.weight"].T
        return combined + self["fc.bias"] if "fc.bias" in self.tensors else combined

    def whole(self, hidden: Tensor, ids: list[int], step: int) -> tuple[Tensor, Tensor]:
        """Output and recurrent hidden state of the last of T slots."""
        embedded = self["embed_tokens.weight"][torch.tensor(ids)]
        normed = self._norm("layers.0.hidden_norm", hidden)
        inputs = torch.cat((self._norm("layers.0.input_layernorm", embedded), normed), 1)
        stream = normed if self.config.get("norm_before_residual") else hidden
        stream = stream + self._attention("layers.0", inputs)
        stream = stream + self._mlp("layers.0", self._norm("layers.0.post_attention_layernorm", stream))
        for index in range(1, self.config["num_hidden_layers"]):
            name = f"layers.{index}"
            stream = stream + self._attention(name, self._norm(f"{name}.input_layernorm", stream))
            stream = stream + self._mlp(name, self._norm(f"{name}.post_attention_layernorm", stream))
        output = self._norm("norm", stream)
        return output[-1], (output if self.config.get("norm_output") else stream)[-1]

    def logits(self, output: Tensor) -> Tensor:
        """[Vd]."""
        return self["lm_head.weight"] @ output

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt() * self[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self[f"{name}.weight"].T
        return out + self[f"{name}.bias"] if f"{name}.bias" in self.tensors else out

    def _attention(self, layer: str, x: Tensor) -> Tensor:
        config, name = self.config, f"{layer}.self_attn"
        size, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
        q, k, v = (self._linear(f"{name}.{part}_proj", x).view(len(x), -1, size) for part in "qkv")
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self._norm(f"{name}.q_norm", q), self._norm(f"{name}.k_norm", k)
        q, k = self._rotate(q), self._rotate(k)
        out = torch.empty(len(x), heads, size, dtype=torch.float64)
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = q[:, head] @ k[:, shared].T / size**0.5
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
            out[:, head] = scores.softmax(-1) @ v[:, shared]
        return self._linear(f"{name}.o_proj", out.flatten(1))

    def _rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
        first, second = x[..., :half], x[..., half:]
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        return torch.cat(turned, -1)

    def _mlp(self, layer: str, x: Tensor) -> Tensor:
        name = f"{layer}.mlp"
        if f"{name}.gate.weight" not in self.tensors:
            return self._gated(name, x)
        shares, chosen = (x @ self[f"{name}.gate.weight"].T).softmax(-1).topk(self.config["num_experts_per_tok"])
        shares = shares / shares.sum(-1, keepdim=True)
        rows = []
        for token in range(len(x)):
            parts = zip(shares[token], chosen[token].tolist(), strict=True)
            rows.append(sum(share * self._gated(f"{name}.experts.{i}", x[token]) for share, i in parts))
        return torch.stack(rows)

    def _gated(self, name: str, x: Tensor) -> Tensor:
        gate = self._linear(f"{name}.gate_proj", x)
        return self._linear(f"{name}.down_proj", gate * gate.sigmoid() * self._linear(f"{name}.up_proj", x))
