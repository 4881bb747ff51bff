"""`outrider bench decode` on tiny shapes, and the floor that it compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from server.bench.shapes import SHAPES
from server.cli import main
from server.engine.attention.torch import TorchAttention
from server.engine.floor import ModelBytes, model_bytes, step_bytes
from server.engine.layers.context import BuildContext
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import build_model
from server.engine.parallel import ParallelGroup
from server.engine.setup import attention_need

FAST = ["--repeats", "1", "--num-kv-blocks", "64", "--prompt-tokens", "20", "--device", "cpu", "--dtype", "float32"]
SYNTHETIC = {"method": "eagle3", "num_speculative_tokens": 3, "rejection_sample_method": "synthetic"}


def test_it_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert main(["bench", "decode", "--shape", "tiny", "--batch-sizes", "1,3", *FAST, "--json", str(path)]) == 0
    assert "share of floor" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert [one["batch"] for one in report["figures"]] == [1, 3]
    for one in report["figures"]:
        assert one["ms_per_token"] > 0 and one["acceptance_length"] is None
        assert one["tokens_per_second"] == pytest.approx(1000 * one["batch"] / one["ms_per_token"])
        assert one["share_of_floor"] == pytest.approx(one["floor_ms"] / one["ms_per_token"])
    assert {row["component"] for row in report["rows"]} >= {"attention", "dtype", "execution"}


def test_a_made_up_head_drafts_with_the_acceptance_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    draft = json.dumps({**SYNTHETIC, "synthetic_acceptance_length": 3.0})
    flags = ["--shape", "tiny-moe", "--batch-sizes", "4", "--speculative-config", draft, *FAST, "--json", str(path)]
    assert main(["bench", "decode", *flags]) == 0
    report = json.loads(path.read_text())
    (figures,) = report["figures"]
    assert figures["acceptance_length"] == pytest.approx(3.0, abs=0.3)
    assert len(figures["acceptance_rates"]) == 3
    assert {row["role"] for row in report["rows"]} == {"target", "draft"}


def test_a_shape_excludes_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "decode", "some-model", "--shape", "tiny"]) == 2
    assert "leave one of them out" in capsys.readouterr().err


@pytest.mark.parametrize(("shape", "gigabytes"), [("qwen3-8b", 15.1), ("qwen3-30b-a3b", 6.1)])
def test_the_floor_of_one_token_is_that_of_the_public_shapes(shape: str, gigabytes: float) -> None:
    config = ModelConfig.from_hf(SHAPES[shape])
    device = torch.device("meta")
    need = attention_need(config, device, torch.bfloat16, torch.bfloat16)
    backend = TorchAttention(need, config.num_layers)
    context = BuildContext(torch.bfloat16, device, backend, "torch", ParallelGroup(0, 1))
    counted = model_bytes(build_model(config, context), 0.0)
    assert step_bytes(counted, None, 1, 0, 512.0) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_a_draft_reads_its_weights_once_a_token() -> None:
    target = ModelBytes(1000, 0, 0, 0, 2.0)
    draft = ModelBytes(100, 0, 0, 0, 1.0, first_pass_only=40)
    assert step_bytes(target, draft, 2, 3, 10.0) == 1000 + 2 * 10 * 2 + 100 + 20 + 2 * (60 + 20)
