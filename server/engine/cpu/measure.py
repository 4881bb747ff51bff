"""Times steps of both forms on this machine, on two layers with random weights and a model's shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from server.engine.attention.torch import TorchAttention
from server.engine.batch import Batch, Span, make_batch
from server.engine.cpu.forms import WeightForms
from server.engine.layers.context import BuildContext
from server.engine.loading.dummy import fill_with_random
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM, build_model
from server.engine.models.linear_names import linear_names
from server.engine.parallel import ParallelGroup
from server.engine.quantization.formats import Formats
from server.engine.quantization.int4 import Int4
from server.engine.setup import attention_need

WIDTHS = (32, 64, 128, 256, 512, 1024)
"""Tokens of the timed steps, each a prompt from its beginning."""
NARROW = 16
"""Steps of so many tokens wait for memory, of which packed weights are a quarter: they need no measurement."""
WIDEST_HIDDEN, WIDEST_MLP = 2048, 8192
"""Larger models are timed as if they were of this size: the two forms compare alike."""
_LAYERS = 2
_PAGE = 16
_REPEATS = 4


@torch.inference_mode()
def most_packed_tokens(config: ModelConfig) -> int:
    """Up to how many tokens a step is quicker with packed weights; the last of `WIDTHS` if always."""
    small = replace(
        config,
        num_layers=_LAYERS,
        vocab_size=64,
        hidden_size=min(config.hidden_size, WIDEST_HIDDEN),
        intermediate_size=min(config.intermediate_size, WIDEST_MLP),
        tie_word_embeddings=False,
        own_embedding=True,
        own_head=True,
        moe=None,
        num_nextn_predict_layers=0,
    )
    device = torch.device("cpu")
    attention = TorchAttention(attention_need(small, device, torch.bfloat16, torch.bfloat16), _LAYERS)
    formats = Formats(dict.fromkeys(linear_names(small), Int4(32)))
    forms = WeightForms(packed=True, plain=True)
    model = build_model(
        small, BuildContext(torch.bfloat16, device, attention, "", ParallelGroup(), formats=formats, forms=forms)
    )
    fill_with_random(model.weight_targets(), 0, lambda done, total: None)
    model.finish_loading()
    pages = WIDTHS[-1] // _PAGE
    attention.allocate(pages + 1, _PAGE)
    cache, stack = attention.cache, model.stack
    if stack is None or cache is None:
        return NARROW
    most = NARROW
    for width in WIDTHS:
        batch = make_batch([Span(list(range(1, pages + 1)), 0, [0] * width)], _PAGE, _PAGE, device)
        packed, plain = _seconds(
            partial(stack, batch.input_ids, batch.positions, batch.step, cache),
            partial(_layer_by_layer, model, attention, batch),
        )
        if packed > plain:
            break
        most = width
    return most


def _layer_by_layer(model: CausalLM, attention: TorchAttention, batch: Batch) -> None:
    model(batch.input_ids, batch.positions, attention.plan(batch.step))


def _seconds(*works: Callable[[], object]) -> list[float]:
    """The shortest of some runs of each, in turns: what others take from the cores only adds."""
    best = [float("inf")] * len(works)
    for turn in range(_REPEATS + 1):
        for i, work in enumerate(works):
            started = perf_counter()
            work()
            if turn:  # the first one fills caches
                best[i] = min(best[i], perf_counter() - started)
    return best
