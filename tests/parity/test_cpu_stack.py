"""The layers as one call against the same model computed layer by layer in float32."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from server.engine.attention.torch import TorchAttention
from server.engine.batch import Batch, Span, make_batch
from server.engine.cpu.forms import PLAIN, WeightForms
from server.engine.layers.context import BuildContext
from server.engine.loading.dummy import fill_with_random
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM, build_model
from server.engine.models.linear_names import linear_names
from server.engine.parallel import ParallelGroup
from server.engine.quantization.format import UNQUANTIZED, WeightFormat
from server.engine.quantization.formats import Formats
from server.engine.quantization.int4 import Int4
from server.engine.setup import attention_need

pytestmark = pytest.mark.usefixtures("cpu_kernels")

CPU = torch.device("cpu")
PAGE = 16
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "rope_theta": 10000.0,
}
SHAPES = {
    "llama": LLAMA,
    "wide heads": LLAMA | {"head_dim": 64, "num_attention_heads": 3, "num_key_value_heads": 1},
    "qwen2": LLAMA | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": LLAMA | {"architectures": ["Qwen3ForCausalLM"]},
    "no groups": LLAMA | {"num_attention_heads": 2},
    "many heads": LLAMA | {"num_attention_heads": 14},
    "scaled rope": LLAMA
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
}


@dataclass(frozen=True)
class Pair:
    """One model twice."""

    packed: CausalLM
    exact: CausalLM
    attention: TorchAttention
    exact_attention: TorchAttention
    page: int

    def both(self, spans: list[Span]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Hidden states and captured boundaries: as one call, and layer by layer in float32."""
        batch = make_batch(spans, self.page, self.page, CPU)
        assert self.packed.stack is not None and self.attention.cache is not None
        got, aux = self.packed.stack(batch.input_ids, batch.positions, batch.step, self.attention.cache)
        wanted = self._exact(batch)
        assert aux is not None and wanted[1] is not None
        return got.float(), aux.float(), wanted[0], wanted[1]

    def _exact(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        hidden = self.exact(batch.input_ids, batch.positions, self.exact_attention.plan(batch.step))
        return hidden.final, hidden.aux


def pair(shape: str, weights: WeightFormat, pages: int = 40, page: int = PAGE) -> Pair:
    config = ModelConfig.from_hf(SHAPES[shape])
    formats = Formats(dict.fromkeys(linear_names(config), weights))
    models, backends = [], []
    for dtype, forms in ((torch.bfloat16, WeightForms(packed=True, plain=False)), (torch.float32, PLAIN)):
        backend = TorchAttention(attention_need(config, CPU, dtype, dtype), config.num_layers)
        context = BuildContext(dtype, CPU, backend, "", ParallelGroup(), formats=formats, forms=forms)
        model = build_model(config, context, capture=(0, 2, 3))
        backend.allocate(pages, page)
        models.append(model)
        backends.append(backend)
    packed, exact = models
    targets, copies = packed.weight_targets(), exact.weight_targets()
    fill_with_random(targets, 7, lambda done, total: None)
    for name, target in targets.items():
        if name.endswith(("weight", "bias")) and target.is_floating_point():
            # Large enough for attention and activations to matter.
            target.mul_(1.0 if "norm" in name else 5.0)
        if name.endswith("norm.weight"):
            target.copy_(torch.rand(target.shape) + 0.5)
        copies[name].copy_(target)
    for model in models:
        model.finish_loading()
    return Pair(packed, exact, backends[0], backends[1], page)


def remember(models: Pair) -> None:
    """Fill both caches with the same numbers, of which few keys matter much to a query."""
    ours, theirs = models.attention.cache, models.exact_attention.cache
    assert ours is not None and theirs is not None
    for mine, exact in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        for layer, copy in zip(mine, exact, strict=True):
            layer.normal_()
            copy.copy_(layer)


def rows(page: int, lengths: list[tuple[int, int]]) -> list[Span]:
    """A span for each (context, new tokens), on pages in no order."""
    free = torch.randperm(sum(-(-(context + new) // page) for context, new in lengths)) + 1
    spans = []
    for context, new in lengths:
        taken = -(-(context + new) // page)
        spans.append(Span(free[:taken].tolist(), context, ids(new)))
        free = free[taken:]
    return spans


def blocks(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def ids(count: int) -> list[int]:
    return torch.randint(0, 96, (count,)).tolist()


@pytest.mark.parametrize("weights", [Int4(32), UNQUANTIZED], ids=["4 bits", "16 bits"])
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_decodes_and_drafts_over_the_cache(shape: str, weights: WeightFormat) -> None:
    torch.manual_seed(3)
    models = pair(shape, weights)
    tables = [blocks(1, 5), blocks(6, 3), blocks(9, 10)]
    at = [0, 0, 0]
    # Prompts of several lengths, a chunk beside decodes, drafts to verify, and decodes alone.
    for counts in ([50, 1, 37], [1, 3, 70], [4, 4, 1], [1, 1, 1], [0, 0, 1]):
        spans = [Span(tables[i], at[i], ids(n)) for i, n in enumerate(counts) if n]
        got, aux, wanted, wanted_aux = models.both(spans)
        # bfloat16 rounds the result, int8 blocks the activations: by parts of a hundred of the norm.
        for mine, exact in ((got, wanted), (aux, wanted_aux)):
            error = (mine - exact).norm(dim=-1) / exact.norm(dim=-1)
            assert float(error.max()) < 0.03, f"{counts}: {error.max():.4f}"
        at = [a + n for a, n in zip(at, counts, strict=True)]
    ours, theirs = models.attention.cache, models.exact_attention.cache
    assert ours is not None and theirs is not None
    for mine, exact in zip(ours.keys, theirs.keys, strict=True):
        torch.testing.assert_close(mine.float(), exact, atol=0.05 * float(exact.abs().max()), rtol=0.05)


LONG = [
    # Around the length from which on keys are divided, and the lengths at which parts become longer.
    [(255, 1), (256, 1), (257, 2), (383, 1), (384, 5), (40, 3)],
    # Parts of several sizes, the last one short; a part that only the last tokens of a row see.
    [(4095, 1), (4096, 1), (4094, 4), (6001, 16)],
    # More new tokens than one item takes, beside a decode.
    [(3000, 17), (2050, 1), (0, 70)],
    [(5000, 1)],
]


@pytest.mark.parametrize("lengths", LONG, ids=lambda lengths: str(lengths[0][0]))
@pytest.mark.parametrize(("shape", "page"), [("llama", 16), ("wide heads", 64), ("no groups", 48), ("many heads", 32)])
def test_long_contexts(shape: str, page: int, lengths: list[tuple[int, int]]) -> None:
    torch.manual_seed(11)
    models = pair(shape, UNQUANTIZED, 2 + sum((context + new) // page + 1 for context, new in lengths), page)
    remember(models)
    got, _, wanted, _ = models.both(rows(page, lengths))
    error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(error.max()) < 0.03, f"{error.max():.4f}"


def test_a_long_row_depends_neither_on_its_neighbours_nor_on_the_threads() -> None:
    torch.manual_seed(13)
    models = pair("llama", Int4(32), 700)
    remember(models)
    spans = rows(PAGE, [(3001, 3), (4500, 1), (2000, 9)])
    together = models.both(spans)[0]
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(models.both(spans)[0], together)
            assert torch.equal(models.both(spans[1:2])[0], together[3:4])
    finally:
        torch.set_num_threads(threads)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(5)
    models = pair("llama", Int4(32))
    prompt, other = ids(21), ids(45)
    alone = models.both([Span(blocks(1, 2), 0, prompt)])[0]
    beside = models.both([Span(blocks(3, 3), 0, other), Span(blocks(6, 2), 0, prompt)])[0][-21:]
    assert torch.equal(alone, beside)


def test_not_a_number_reaches_its_own_row_only() -> None:
    models = pair("llama", Int4(32))
    models.packed.ends.embed_tokens.weight[5] = float("nan")
    assert models.packed.stack is not None and models.attention.cache is not None
    # The one that is not a number comes into a short context, and into one whose keys are divided.
    for contexts in ((0, 0), (20, 300)):
        spans = [Span(blocks(1, 2), contexts[0], [1, 2, 3]), Span(blocks(3, 20), contexts[1], [4, 5])]
        batch = make_batch(spans, PAGE, PAGE, CPU)
        hidden, _ = models.packed.stack(batch.input_ids, batch.positions, batch.step, models.attention.cache)
        assert hidden.isfinite().all(-1).tolist()[:3] == [True, True, True]
        assert not hidden[4].isfinite().any()


def test_what_one_call_cannot_take_goes_layer_by_layer() -> None:
    config = replace(ModelConfig.from_hf(LLAMA), intermediate_size=100)
    backend = TorchAttention(attention_need(config, CPU, torch.bfloat16, torch.bfloat16), config.num_layers)
    forms = WeightForms(packed=True, plain=False)
    model = build_model(config, BuildContext(torch.bfloat16, CPU, backend, "", ParallelGroup(), forms=forms))
    fill_with_random(model.weight_targets(), 7, lambda done, total: None)
    model.finish_loading()
    assert model.stack is None
    assert model(
        torch.tensor([1]), torch.tensor([0]), backend.plan(make_batch([Span([1], 0, [1])], PAGE, PAGE, CPU).step)
    )
