"""The llama3 divisors that GGUF files hold against transformers' own frequencies."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from server.checkpoint.gguf_rope import llama3_divisors


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 4096)])
def test_llama3_divisors(factor: float, original: int) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
    config = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device=torch.device("cpu"))
    plain = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    divisors = torch.tensor(llama3_divisors(500000.0, 128, factor, original))
    torch.testing.assert_close(plain / divisors, frequencies, rtol=1e-4, atol=0)
