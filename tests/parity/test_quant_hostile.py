"""Quantised checkpoints that are broken: each stops the start with the name of the tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_oracle import BASE
from paged_steps import build
from quant_checkpoints import Quantized, quantized, save
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from server.engine.loading.load import load_weights
from server.engine.models.linear_names import target_modules
from server.errors import UserError

CONFIG = Qwen3MoeConfig(
    **BASE
    | {"num_hidden_layers": 1, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16}
)
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.experts.2.up_proj"
Change = Callable[[dict[str, Tensor]], None]


def without(name: str) -> Change:
    return lambda tensors: tensors.__delitem__(name)


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]).contiguous())


def with_nan(tensor: Tensor) -> Tensor:
    if tensor.dtype is torch.float8_e4m3fn:
        codes = tensor.view(torch.uint8).clone()
        codes.view(-1)[1] = 0xFF
        return codes.view(tensor.dtype)
    changed = tensor.clone()
    changed.view(-1)[0] = float("nan")
    return changed


CASES: dict[str, tuple[str, Any, Change, str]] = {
    "fp8 without its scale": (
        "fp8_block",
        "fp8",
        without(f"{Q}.weight_scale_inv"),
        rf"{Q}\.weight: stored as F8_E4M3, but no weight_scale",
    ),
    "int4 without its scale": (
        "int4_g16",
        "compressed-tensors",
        without(f"{UP}.weight_scale"),
        rf"{UP}\.weight_packed: weight_scale is missing beside it",
    ),
    "int4 without its shape": (
        "int4_g16",
        "compressed-tensors",
        without(f"{UP}.weight_shape"),
        rf"lacks tensor {UP}\.weight_shape",
    ),
    "no zero points": (
        "int4_g16_asym",
        "compressed-tensors",
        without(f"{Q}.weight_zero_point"),
        r"\(int4_g16\), but config_groups\.group_0 .* says int4_g16_asym",
    ),
    "nvfp4 without its tensor scale": (
        "nvfp4",
        "compressed-tensors",
        without(f"{Q}.weight_global_scale"),
        rf"{Q}\.weight_packed: stored as U8",
    ),
    "modelopt without its tensor scale": (
        "nvfp4",
        "modelopt",
        without(f"{Q}.weight_scale_2"),
        rf"{Q}\.weight: stored as U8 beside weight_scale, which is not a supported format",
    ),
    "a module without any tensor": (
        "nvfp4",
        "modelopt",
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"{UP}.")] and None,
        rf"lacks 3 tensors \({UP}\.weight, {UP}\.weight_scale, ",
    ),
    "transposed codes": (
        "int4_g16",
        "compressed-tensors",
        replaced(f"{Q}.weight_packed", lambda tensor: tensor.reshape(48, 12)),
        rf"{Q}\.weight_scale: shape \[96, 3\] does not fit int4_g16.* at 96 columns",
    ),
    "codes of a shorter row": (
        "nvfp4",
        "compressed-tensors",
        replaced(f"{Q}.weight_packed", lambda tensor: tensor[:, :-1]),
        rf"{Q}\.weight_packed has shape \[96, 23\], but the model's config makes .* \[96, 24\]",
    ),
    "too few rows": (
        "fp8_channel",
        "compressed-tensors",
        replaced(f"{Q}.weight_scale", lambda tensor: tensor[:-1]),
        rf"{Q}\.weight_scale: shape \[95, 1\] fits a weight \[96, 48\] neither",
    ),
    "scales of another type": (
        "nvfp4",
        "modelopt",
        replaced(f"{UP}.weight_scale", lambda tensor: tensor.float()),
        rf"{UP}\.weight_scale: stored as F32; NVFP4 has F8_E4M3 scales",
    ),
    "zero points of another type": (
        "int4_g16_asym",
        "compressed-tensors",
        replaced(f"{UP}.weight_zero_point", lambda tensor: tensor.to(torch.int8)),
        rf"{UP}\.weight_zero_point is stored as I8; the model reads it from I32",
    ),
    "nan in codes": ("fp8_tensor", "modelopt", replaced(f"{UP}.weight", with_nan), rf"{UP}\.weight holds 1 .* NaN"),
    "nan in a scale": (
        "fp8_channel",
        "compressed-tensors",
        replaced(f"{UP}.weight_scale", with_nan),
        rf"{UP}\.weight_scale holds 1 values that are NaN",
    ),
    "nan in an e4m3 scale": (
        "nvfp4",
        "compressed-tensors",
        replaced(f"{Q}.weight_scale", with_nan),
        rf"{Q}\.weight_scale holds 1 values that are NaN",
    ),
    "another shape": (
        "int4_g16",
        "compressed-tensors",
        replaced(f"{Q}.weight_shape", lambda tensor: tensor.flip(0)),
        rf"{Q}\.weight_shape holds \[48, 96\], but the model's config makes it \[96, 48\]",
    ),
    "another shape of an expert": (
        "int4_g16",
        "compressed-tensors",
        replaced(f"{UP}.weight_shape", lambda tensor: tensor + 1),
        r"layers\.0\.mlp\.experts\..*up.*weight_shape holds \[25, 49\], but .* \[24, 48\]",
    ),
    "division by zero": (
        "nvfp4",
        "compressed-tensors",
        replaced(f"{UP}.weight_global_scale", torch.zeros_like),
        r"experts\..*weight_global_scale holds a scale that is not positive",
    ),
    "left over": (
        "fp8_block",
        "fp8",
        lambda tensors: tensors.__setitem__(f"{Q}.surplus", torch.zeros(1)),
        rf"holds tensor {Q}\.surplus, which the model has no place for",
    ),
    "scales in two names": (
        "fp8_block",
        "fp8",
        lambda tensors: tensors.__setitem__(f"{Q}.weight_scale", torch.ones(1)),
        rf"\(fp8_tensor\), but .*fp8_block|{Q}\.weight_scale.*no place",
    ),
}


def start(made: Quantized, dtype: torch.dtype = torch.float32) -> None:
    """As the server does: plan, build, load."""
    config = made.config()
    formats = made.formats()
    formats.labels(target_modules(config))
    paged = build(config, dtype=dtype, formats=formats)
    load_weights(paged.model, made.checkpoint, "auto", 0, lambda done, total: None)


@pytest.mark.parametrize("case", CASES)
def test_refused(case: str, tmp_path: Path) -> None:
    scheme, layout, change, message = CASES[case]
    made = quantized(CONFIG, tmp_path, scheme, layout=layout)
    start(made)
    tensors = load_file(made.folder / "model.safetensors")
    change(tensors)
    save(tensors, made.folder)
    with pytest.raises(UserError, match=message):
        start(made)


def test_numbers_beyond_the_models_dtype(tmp_path: Path) -> None:
    made = quantized(CONFIG, tmp_path, "fp8_tensor", layout="modelopt")
    tensors = load_file(made.folder / "model.safetensors")
    tensors[f"{Q}.weight_scale"] = torch.tensor(1000.0)
    save(tensors, made.folder)
    start(made, torch.bfloat16)
    with pytest.raises(UserError, match=rf"{Q}: its fp8_tensor tensors stand for numbers beyond float16"):
        start(made, torch.float16)


def test_scales_of_activations_and_caches_are_left_aside(tmp_path: Path) -> None:
    made = quantized(CONFIG, tmp_path, "nvfp4", layout="modelopt")
    tensors = load_file(made.folder / "model.safetensors")
    tensors |= {f"{Q}.input_scale": torch.ones(()), f"{UP}.input_scale": torch.ones(())}
    tensors |= {f"model.layers.0.self_attn.{kind}_proj.{kind}_scale": torch.ones(()) for kind in "kv"}
    save(tensors, made.folder)
    start(made)
    tensors["model.layers.0.mlp.gate.input_scale"] = torch.ones(())
    save(tensors, made.folder)
    with pytest.raises(UserError, match=r"mlp\.gate\.input_scale, which the model has no place for"):
        start(made)
