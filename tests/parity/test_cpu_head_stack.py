"""An EAGLE-3 head's layers as one call against the same head computed layer by layer in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from server.engine.attention.torch import TorchAttention
from server.engine.batch import Span, make_batch
from server.engine.cpu.forms import PLAIN, WeightForms
from server.engine.layers.context import BuildContext
from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear
from server.engine.loading.dummy import fill_with_random
from server.engine.models.config import ModelConfig
from server.engine.models.draft import Borrowed
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.eagle3_config import Eagle3Config
from server.engine.parallel import ParallelGroup
from server.engine.setup import attention_need

pytestmark = pytest.mark.usefixtures("cpu_kernels")

CPU = torch.device("cpu")
PAGE = 16
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
TARGET = ModelConfig.from_hf(SHAPE | {"architectures": ["LlamaForCausalLM"]})
HEAD = SHAPE | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 48}
OPTIONS = {
    "plain": {},
    "normed residual": {"norm_before_residual": True},
    "normed output": {"norm_output": True},
    "two layers": {"num_hidden_layers": 2},
}


def head(config: Eagle3Config, dtype: torch.dtype, forms: WeightForms) -> tuple[Eagle3Draft, TorchAttention]:
    backend = TorchAttention(attention_need(config.model, CPU, dtype, dtype), config.model.num_layers)
    context = BuildContext(dtype, CPU, backend, "", ParallelGroup(), forms=forms)
    ends = Borrowed(VocabEmbedding(96, 64, context), Linear(64, {"lm_head": 96}, context))
    backend.allocate(24, PAGE)
    return Eagle3Draft(config, context, ends), backend


def pair(option: str) -> tuple[tuple[Eagle3Draft, TorchAttention], tuple[Eagle3Draft, TorchAttention]]:
    config = Eagle3Config.read(HEAD | OPTIONS[option], {}, TARGET)
    packed = head(config, torch.bfloat16, WeightForms(packed=True, plain=False))
    exact = head(config, torch.float32, PLAIN)
    targets, copies = packed[0].weight_targets(), exact[0].weight_targets()
    fill_with_random(targets, 7, lambda done, total: None)
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.copy_(torch.rand(target.shape) + 0.5)
        elif target.is_floating_point():
            target.mul_(5.0)
        copies[name].copy_(target)
    embedding = torch.randn(96, 64).bfloat16()
    for model, _ in (packed, exact):
        model.ends.embed_tokens.weight.data.copy_(embedding)
        model.finish_loading()
    return packed, exact


def close(got: Tensor, wanted: Tensor) -> bool:
    return bool((got.float() - wanted).norm() / wanted.norm() < 0.02)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_chain_of_drafts_over_the_cache(option: str) -> None:
    torch.manual_seed(5)
    (packed, attention), (exact, exact_attention) = pair(option)
    assert packed.stack is not None and exact.stack is None
    assert attention.cache is not None
    spans = [Span([3, 1], 0, torch.randint(0, 96, (21,)).tolist()), Span([2], 0, [7, 8, 9])]
    hidden = torch.randn(24, 64) * 3
    for ahead in range(3):
        batch = make_batch(spans, PAGE, PAGE, CPU)
        with torch.inference_mode():
            output, stream = packed.stack(
                batch.input_ids, batch.positions, batch.step, attention.cache, hidden.bfloat16()
            )
            plan = exact_attention.plan(batch.step)
            wanted = exact(hidden.bfloat16().float(), batch.input_ids, batch.positions, plan, ahead)
        assert stream is not None
        recurrent = output if packed.config.norm_output else stream
        assert close(output, wanted.output)
        assert close(recurrent, wanted.recurrent)
        assert torch.equal(packed.highest(output, 96), packed.ends.lm_head.scores(output).argmax(-1))
        hidden = wanted.recurrent[[20, 23]] if not ahead else wanted.recurrent
        spans = [Span([3, 1], 21 + ahead, [ahead]), Span([2], 3 + ahead, [ahead + 50])]
