"""The hidden states that a target captures for its draft, against transformers' own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_oracle import BASE, oracle
from paged_steps import build, close, fill, prompt
from transformers import Glm4MoeConfig, LlamaConfig, PreTrainedConfig

from server.engine.attention.base import StepMetadata
from server.engine.layers.context import BuildContext
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import build_model
from server.engine.parallel import ParallelGroup

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**BASE | {"num_hidden_layers": 4}),
    "glm": Glm4MoeConfig(
        **BASE | {"num_hidden_layers": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
        moe_intermediate_size=24,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("capture", [(0, 1, 3), (2,), (0, 1, 2, 3, 4)])
def test_captured_boundaries(name: str, capture: tuple[int, ...], tmp_path: Path) -> None:
    hf, saved, tensors = oracle(CONFIGS[name], tmp_path)
    paged = build(ModelConfig.from_hf(saved))
    context = BuildContext(torch.float32, torch.device("cpu"), paged.attention, "torch", ParallelGroup())
    captured = build_model(paged.model.config, context, capture)
    fill(captured, tensors)
    fill(paged.model, tensors)
    ids = prompt(5, 13, 96)
    last: list[torch.Tensor] = []
    hf.model.layers[-1].register_forward_hook(lambda module, args, out: last.append(out))
    states = hf.model(torch.tensor([ids]), use_cache=False, output_hidden_states=True).hidden_states
    # transformers gives the last one after the final norm; the hook has it before.
    boundaries = [*(state[0] for state in states[:-1]), last[0][0]]
    step = StepMetadata([0, 13], [13], torch.zeros(1, 1, dtype=torch.int64), torch.arange(13))
    plan = paged.attention.plan(step)
    hidden = captured(torch.tensor(ids), torch.arange(13), plan)
    assert hidden.aux is not None
    expected = torch.cat([boundaries[i] for i in capture], -1)
    assert close(hidden.aux, expected) < 1e-4
    assert close(hidden.final, states[-1][0]) < 1e-4
    plain = paged.model(torch.tensor(ids), torch.arange(13), plan)
    assert plain.aux is None
    assert torch.equal(plain.final, hidden.final)
    picked = hidden.select(torch.tensor([3, 0]))
    assert picked.aux is not None
    assert torch.equal(picked.aux, hidden.aux[[3, 0]])
    assert torch.equal(picked.final, hidden.final[[3, 0]])
