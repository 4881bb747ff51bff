"""transformers on the weights that a server serves: what greedy decoding and scoring must give."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.locate import locate
from server.engine.loading.gguf_source import gguf_sources

NEAR_TIE = 1e-3
"""Logits that lie this close may change places between two orders of summation."""


@dataclass(frozen=True)
class Miss:
    """A token that is not the oracle's most probable one."""

    position: int
    token_id: int
    best_id: int
    gap: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap <= NEAR_TIE


class Oracle:
    """One model in fp32, whole sequences at a time, no cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """[n, V] for n token ids."""
        logits: Tensor = self.model(torch.tensor([ids]), use_cache=False).logits[0]
        return logits

    def misses(self, prompt: list[int], output: list[int]) -> list[Miss]:
        """Where a greedy continuation differs: empty means that greedy decoding gives exactly this output."""
        logits = self.logits(prompt + output)[len(prompt) - 1 : -1]
        best = logits.argmax(-1)
        return [
            Miss(i, token, int(best[i]), float(logits[i, best[i]] - logits[i, token]))
            for i, token in enumerate(output)
            if token != int(best[i])
        ]

    def logprobs(self, ids: list[int]) -> Tensor:
        """[n - 1], of ids[1:] each after those before it."""
        scores = self.logits(ids)[:-1].log_softmax(-1)
        return scores.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]

    @torch.no_grad()
    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """What `generate` gives, EOS or not."""
        ids = torch.tensor([prompt])
        made = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return [int(token) for token in made[0, len(prompt) :]]


def folder_oracle(folder: Path) -> Oracle:
    """Of a model folder, read by transformers itself."""
    return Oracle(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def smollm2_model() -> LlamaForCausalLM:
    """The embedded GGUF's tensors, dequantised to fp32, in transformers' model."""
    checkpoint = locate(None)
    rope = {"rope_theta": checkpoint.config["rope_theta"], "rope_type": "default"}
    plain = {name: value for name, value in checkpoint.config.items() if name not in ("rope_theta", "rope_scaling")}
    model = LlamaForCausalLM(LlamaConfig(**plain, rope_parameters=rope)).float()
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for source in gguf_sources(read_gguf_header(checkpoint.path), checkpoint.config):
            source.copy_to(parameters.pop(source.name))
    assert not parameters, f"nothing filled {sorted(parameters)}"
    return model
