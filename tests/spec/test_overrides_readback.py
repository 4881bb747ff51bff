"""What is shown is read from the layers: where they hold something else than planned, the start stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from server.engine.attention.registry import attention_backend
from server.engine.layers.attention import Attention
from server.engine.layers.linear import Linear
from server.engine.layers.moe import Experts
from server.engine.layers.norm import RMSNorm
from server.engine.moe.torch import TorchMoE
from server.engine.readback import read_back
from server.engine.runner import ModelRunner
from server.errors import UserError
from tests.spec.engine_harness import make_engine
from tests.spec.override_models import NEURAL, Folders, draft_runner, modules, write_folders

Runner = ModelRunner[Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("readback"))


def other_attention(runner: Runner) -> None:
    need = runner.setup.need
    modules(runner.model, Attention)[-1].backend = attention_backend("triton")(need, 1)


def other_experts(runner: Runner) -> None:
    layer = modules(runner.model, Experts)[-1]
    layer.backend = TorchMoE(layer.backend.need)


def other_kv_dtype(runner: Runner) -> None:
    layer = modules(runner.model, Attention)[-1]
    layer.backend = attention_backend("torch")(replace(runner.setup.need, kv_dtype=torch.bfloat16), 1)


def other_format(runner: Runner) -> None:
    modules(runner.model, Linear)[-1].weight_format = SimpleNamespace(label="fp8_channel")


def other_dtype(runner: Runner) -> None:
    layer = modules(runner.model, RMSNorm)[-1]
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.bfloat16), requires_grad=False)


def other_weights(runner: Runner) -> None:
    runner.loaded_from = "dummy"


def no_row_for_experts(runner: Runner) -> None:
    rows = tuple(row for row in runner.setup.rows if row.component != "moe")
    runner.setup = replace(runner.setup, rows=rows)


CHANGES = [
    (other_attention, "attention was planned as torch", "triton"),
    (other_kv_dtype, "kv_cache_dtype was planned as float32", "bfloat16"),
    (other_format, "quantization was planned as none", "fp8_channel"),
    (other_dtype, "dtype was planned as float32", "bfloat16"),
    (other_weights, "load_format was planned as safetensors", "dummy"),
    (other_experts, "moe was planned as grouped_mm", "torch"),
    (no_row_for_experts, "no experts were planned", "grouped_mm"),
]


@pytest.mark.parametrize(("change", "planned", "found"), CHANGES, ids=[change.__name__ for change, *_ in CHANGES])
@pytest.mark.parametrize("proposer", NEURAL)
def test_a_layer_that_differs_from_the_plan_stops_the_start(
    change: Callable[[Runner], None], planned: str, found: str, proposer: str, folders: Folders
) -> None:
    engine = make_engine(folders.target, folders.drafts[proposer])
    for runner in (draft_runner(engine), engine.built.target):
        assert read_back(runner)[0]
        change(runner)
        with pytest.raises(UserError) as caught:
            read_back(runner)
        message, _, built = str(caught.value).partition(" and built as ")
        assert message == f"{runner.setup.role}: {planned}"
        assert found in built.partition(".")[0].split(", ") and "please report it" in built
