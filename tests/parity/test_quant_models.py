"""Whole quantised models, from files, against transformers with the weights that the files stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_oracle import BASE, reference_logits
from paged_steps import close, mixed_run, prompt
from quant_checkpoints import Quantized, quantized
from safetensors.torch import load_file
from transformers import Glm4MoeConfig, LlamaConfig, PreTrainedConfig, Qwen3MoeConfig

from server.engine.layers.linear import Linear
from server.engine.layers.moe import Experts
from server.engine.models.linear_names import target_modules
from server.engine.quantization.write import main

TOLERANCE = 1e-4
MOE = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16, "num_hidden_layers": 2}
LLAMA = LlamaConfig(**BASE | {"num_hidden_layers": 2, "attention_bias": True})
QWEN = Qwen3MoeConfig(**BASE | MOE | {"num_experts": 4})
GLM = Glm4MoeConfig(**BASE | MOE | {"n_routed_experts": 4, "attention_bias": True})
# Widths of whole groups of 32, as the packed product wants them.
WIDE = {"hidden_size": 64, "moe_intermediate_size": 32}
WIDE_QWEN = Qwen3MoeConfig(**BASE | MOE | {"num_experts": 4} | WIDE)

SCHEMES = [
    ("fp8_tensor", "compressed-tensors"),
    ("fp8_channel", "compressed-tensors"),
    ("fp8_block", "compressed-tensors"),
    ("fp8_block", "fp8"),
    ("fp8_tensor", "fp8"),
    ("fp8_tensor", "modelopt"),
    ("fp8_channel", "modelopt"),
    ("fp8_block", "modelopt"),
    ("int4_g32", "compressed-tensors"),
    ("int4_g16_asym", "compressed-tensors"),
    ("int4_channel", "compressed-tensors"),
    ("nvfp4", "compressed-tensors"),
    ("nvfp4", "modelopt"),
]
GROUPS = {"int4_g32": 32, "int4_g16_asym": 16}


def check(made: Quantized, group: int | None, dtype: torch.dtype = torch.float32, moe: str = "torch") -> None:
    """Equal to transformers with dequantised weights, and different from the plain model."""
    ids = {"a": prompt(1, 30, 96), "b": prompt(2, 23, 96), "c": prompt(3, 20, 96)}
    hf = made.dequantized_hf(group)
    plain = reference_logits(made.hf, ids["a"])
    got = mixed_run(made.load(dtype, moe), ids)
    for name, logits in got.items():
        assert close(logits, reference_logits(hf, ids[name])) < TOLERANCE
    assert close(got["a"], plain) > 100 * TOLERANCE


@pytest.mark.parametrize(("scheme", "layout"), SCHEMES)
def test_llama(scheme: str, layout: Any, tmp_path: Path) -> None:
    made = quantized(LLAMA, tmp_path, scheme, layout=layout)
    assert made.target_labels() == {scheme, "none"}
    check(made, GROUPS.get(scheme))


FAST = {("fp8_block", "fp8"), ("fp8_tensor", "modelopt"), ("int4_g16_asym", "compressed-tensors")} | {
    ("nvfp4", "compressed-tensors")
}
CASES = [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in SCHEMES]


@pytest.mark.parametrize(("scheme", "layout"), CASES)
@pytest.mark.parametrize("config", [QWEN, GLM], ids=["qwen3_moe", "glm4_moe"])
def test_moe(config: PreTrainedConfig, scheme: str, layout: Any, tmp_path: Path) -> None:
    made = quantized(config, tmp_path, scheme, layout=layout)
    check(made, GROUPS.get(scheme))
    assert {format.label for format in made.formats().experts(target_modules(made.config()))} == {scheme}


def test_what_the_layers_hold(tmp_path: Path) -> None:
    made = quantized(GLM, tmp_path, [("re:.*mlp.experts", "nvfp4"), (None, "fp8_block")])
    paged = made.load()
    held = {name: m.weight_format.label for name, m in paged.model.named_modules() if isinstance(m, Linear | Experts)}
    assert held["layers.1.mlp.experts"] == "nvfp4"
    assert held["layers.1.mlp.shared_experts.down_proj"] == "fp8_block"
    assert held["layers.0.mlp.gate_up_proj"] == "fp8_block"
    assert held["lm_head"] == "none"
    assert set(held.values()) == made.target_labels() == {"nvfp4", "fp8_block", "none"}
    assert paged.model.num_parameters == sum(tensor.numel() for tensor in made.plain.values())
    check(made, None)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt", "fp8"])
def test_mixed_precision_by_ignore_lists(layout: Any, tmp_path: Path) -> None:
    ignore = {
        "compressed-tensors": ["re:.*layers\\.0\\.mlp\\.", "lm_head"],
        "modelopt": ["model.layers.0.mlp*", "*lm_head"],
        "fp8": ["model.layers.0.mlp", "lm_head"],
    }[layout]
    made = quantized(QWEN, tmp_path, "fp8_block", layout=layout, ignore=ignore)
    formats = made.formats()
    assert formats.format_of("model.layers.0.mlp.experts.3.up_proj").label == "none"
    assert formats.format_of("model.layers.1.mlp.experts.3.up_proj").label == "fp8_block"
    assert {format.label for format in formats.experts()} == {"none", "fp8_block"}
    assert formats.notes == {}
    check(made, None)


def test_quantised_head_and_tied_head(tmp_path: Path) -> None:
    made = quantized(LLAMA, tmp_path / "own", "int4_g32", ignore=[])
    assert made.target_labels() == {"int4_g32"}
    check(made, 32)
    tied = LlamaConfig(**BASE | {"num_hidden_layers": 1, "tie_word_embeddings": True})
    made = quantized(tied, tmp_path / "tied", "int4_g32", ignore=[])
    assert made.target_labels() == {"int4_g32", "none"}
    check(made, 32)


@pytest.mark.parametrize("scheme", ["int4_g32", "int4_channel", "int4_g32_asym"])
def test_packed_int4_experts(scheme: str, tmp_path: Path) -> None:
    made = quantized(WIDE_QWEN, tmp_path, scheme)
    check(made, 32 if "g32" in scheme else None, moe="torch_int4")
    ids = {"a": prompt(1, 30, 96), "b": prompt(2, 23, 96), "c": prompt(3, 20, 96)}
    bf16 = [mixed_run(made.load(torch.bfloat16, moe), ids)["a"] for moe in ("torch", "torch_int4")]
    assert close(*bf16) < 0.15 * float(bf16[0].std())


@pytest.mark.parametrize(("scheme", "layout"), [("fp8_block", "fp8"), ("int4_g16_asym", "compressed-tensors")])
def test_dummy_weights(scheme: str, layout: Any, tmp_path: Path) -> None:
    made = quantized(GLM, tmp_path, scheme, layout=layout)
    for file in made.folder.glob("*.safetensors"):
        file.unlink()
    assert made.checkpoint.format == "config"
    paged = made.load_dummy()
    assert made.target_labels() == {scheme, "none"}
    logits = paged.step({"a": prompt(1, 8, 96)})["a"]
    assert bool(logits.isfinite().all())
    assert torch.equal(logits, made.load_dummy().step({"a": prompt(1, 8, 96)})["a"])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = quantized(LLAMA, tmp_path, "nvfp4")
    out = tmp_path / "by command"
    plain = str(tmp_path / "plain")
    assert main([plain, str(out), "--scheme-for", "re:.*down_proj", "fp8_channel", "--scheme", "int4_g16"]) == 0
    assert "2 modules fp8_channel, 12 modules int4_g16" in capsys.readouterr().out
    tensors = load_file(out / "model.safetensors")
    assert tensors["model.layers.1.mlp.down_proj.weight"].dtype is torch.float8_e4m3fn
    assert tensors["model.layers.1.mlp.up_proj.weight_shape"].tolist() == [80, 48]
    assert (out / "generation_config.json").exists()
    for arguments, message in (
        ([plain, str(out), "--scheme", "int4_g16"], "is not an empty folder"),
        ([plain, str(tmp_path / "x"), "--scheme", "int3"], "'int3' does not exist in the layout"),
        ([plain, str(tmp_path / "x"), "--scheme", "int4_g16", "--layout", "fp8"], "does not exist in the layout fp8"),
        ([str(made.folder), str(tmp_path / "x"), "--scheme", "nvfp4"], "is quantised already"),
    ):
        assert main(arguments) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
