"""Headers and metadata to formats, and what the user reads when they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from server.checkpoint.locate import locate
from server.engine.models.config import ModelConfig
from server.engine.models.linear_names import linear_names, target_modules
from server.engine.quantization.format import UNQUANTIZED, QuantizedFormat
from server.engine.quantization.formats import Formats
from server.engine.quantization.fp8 import Fp8
from server.engine.quantization.int4 import Int4
from server.engine.quantization.nvfp4 import Nvfp4
from server.engine.quantization.resolve import resolve_formats
from server.engine.quantization.schemes import Scheme, metadata
from server.errors import UserError

BASE: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "num_nextn_predict_layers": 1,
}
INT4 = Int4(16)
BLOCK = Fp8("block", "weight_scale_inv")


def shape_of(name: str) -> tuple[int, int]:
    """A shape of its own for each kind of module."""
    sizes = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32), "eh_proj": (32, 64)}
    leaf = name.rpartition(".")[2]
    if leaf in sizes:
        return sizes[leaf]
    width = 16 if "experts" in name else 48
    return (64, 32) if name == "lm_head" else (32, width) if leaf == "down_proj" else (width, 32)


def tensors(name: str, format: QuantizedFormat | None) -> dict[str, Tensor]:
    rows, columns = shape_of(name)
    if format is None:
        return {f"{name}.weight": torch.zeros(rows, columns)}
    specs = format.tensors(rows, columns)
    return {f"{name}.{part}": torch.zeros(spec.shape).to(spec.dtype) for part, spec in specs.items()}


def plain(name: str) -> QuantizedFormat | None:
    return None


def all_but_head(format: QuantizedFormat) -> Callable[[str], QuantizedFormat | None]:
    return lambda name: None if name == "lm_head" else format


def only_target(format: QuantizedFormat) -> Callable[[str], QuantizedFormat | None]:
    return lambda name: None if name == "lm_head" or ".2." in name.partition("mlp")[0] else format


def write(
    folder: Path,
    format_of: Callable[[str], QuantizedFormat | None],
    quantization: dict[str, Any] | None,
    *,
    rename: Callable[[str], str] = lambda name: name,
    extra: dict[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    contents: dict[str, Tensor] = {
        "model.embed_tokens.weight": torch.zeros(64, 32),
        "model.norm.weight": torch.ones(32),
    }
    for layer in (1, 2):
        contents[f"model.layers.{layer}.mlp.gate.weight"] = torch.zeros(2, 32)
    for name in linear_names(ModelConfig.from_hf(BASE)):
        contents |= tensors(name, format_of(name))
    contents |= extra or {}
    save_file({rename(name): tensor for name, tensor in contents.items()}, folder / "model.safetensors")
    whole = BASE | config | ({"quantization_config": quantization} if quantization else {})
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def resolve(folder: Path) -> Formats:
    checkpoint = locate(str(folder))
    return resolve_formats(checkpoint, ModelConfig.from_hf(checkpoint.config))


TARGET = target_modules(ModelConfig.from_hf(BASE))


def mtp(name: str) -> bool:
    return name.startswith("model.layers.2.")


def ct(format: QuantizedFormat, ignore: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    return (
        metadata([Scheme(format, None, [])], ["lm_head"] if ignore is None else ignore, "compressed-tensors") | changes
    )


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]} | changes


def modelopt(algorithm: str, **changes: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]} | changes


AGREEING = {
    "int4": (INT4, ct(INT4), "int4_g16"),
    "int4 asymmetric": (Int4(16, False), ct(Int4(16, False)), "int4_g16_asym"),
    "int4 channel": (Int4(None), ct(Int4(None)), "int4_channel"),
    "nvfp4": (Nvfp4("compressed-tensors"), ct(Nvfp4("compressed-tensors")), "nvfp4"),
    "fp8 tensor": (Fp8("tensor", scale_dims=1), ct(Fp8("tensor")), "fp8_tensor"),
    "fp8 channel": (Fp8("channel"), ct(Fp8("channel")), "fp8_channel"),
    "fp8 block": (Fp8("block", block=(16, 16)), ct(Fp8("block")), "fp8_block_16x16"),
    "qwen": (BLOCK, fp8(modules_to_not_convert=["lm_head"]), "fp8_block"),
    "minimax": (BLOCK, fp8(ignored_layers=["lm_head"]), "fp8_block"),
    "fp8 tensor, hf": (
        Fp8("tensor", "weight_scale_inv", 0),
        fp8(weight_block_size=None, modules_to_not_convert=["lm_head"]),
        "fp8_tensor",
    ),
    "modelopt fp8": (Fp8("tensor", scale_dims=0), modelopt("FP8"), "fp8_tensor"),
    "modelopt channel": (Fp8("channel", scale_dims=1), modelopt("FP8_PER_CHANNEL_PER_TOKEN"), "fp8_channel"),
    "modelopt block": (Fp8("block", scale_dims=4), modelopt("FP8_PB_WO"), "fp8_block"),
    "modelopt nvfp4": (Nvfp4("modelopt", 0), modelopt("NVFP4"), "nvfp4"),
}
AGREEING["fp8 block"][1]["config_groups"]["group_0"]["weights"]["block_structure"] = "16x16"


@pytest.mark.parametrize("case", AGREEING)
def test_headers_and_metadata_agree(case: str, tmp_path: Path) -> None:
    format, quantization, label = AGREEING[case]
    formats = resolve(write(tmp_path, all_but_head(format), quantization))
    assert formats.labels() == {label, "none"}
    assert formats.labels(mtp) == {label}
    assert formats.format_of("model.layers.0.self_attn.q_proj") == format
    assert formats.format_of("lm_head") == UNQUANTIZED
    assert formats.experts(TARGET) == formats.experts(mtp) == {format}
    assert formats.notes == {}
    assert formats.why(TARGET) == f"the tensors; metadata: {quantization['quant_method']}"
    assert set(formats.by_module) == set(linear_names(ModelConfig.from_hf(BASE)))


@pytest.mark.parametrize("case", AGREEING)
def test_metadata_alone(case: str, tmp_path: Path) -> None:
    _, quantization, label = AGREEING[case]
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"quantization_config": quantization}))
    assert resolve(tmp_path).labels() == {label, "none"}


def test_plain_checkpoints(tmp_path: Path) -> None:
    formats = resolve(write(tmp_path, plain, None))
    assert formats.labels() == formats.labels(TARGET) == {"none"}
    assert formats.experts() == {UNQUANTIZED}
    assert formats.why() == "the tensors; no metadata"


def test_a_separate_file_of_metadata(tmp_path: Path) -> None:
    write(tmp_path, all_but_head(Nvfp4("modelopt", 0)), None)
    content = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    formats = resolve(tmp_path)
    assert formats.labels() == {"nvfp4", "none"}
    assert formats.why() == "the tensors; metadata: modelopt"


def test_compression_config(tmp_path: Path) -> None:
    quantization = ct(INT4)
    del quantization["quant_method"]
    write(tmp_path, all_but_head(INT4), None, compression_config=quantization)
    assert resolve(tmp_path).why() == "the tensors; metadata: compressed-tensors"


def test_a_plain_mtp_layer_that_the_list_names(tmp_path: Path) -> None:
    formats = resolve(write(tmp_path, only_target(INT4), ct(INT4, ["lm_head", "re:model\\.layers\\.2\\."])))
    assert formats.labels(mtp) == {"none"}
    assert formats.labels(TARGET) == {"int4_g16", "none"}
    assert formats.experts(mtp) == {UNQUANTIZED}
    assert formats.notes == {}


def test_a_plain_mtp_layer_that_no_list_names(tmp_path: Path) -> None:
    formats = resolve(write(tmp_path, only_target(INT4), ct(INT4)))
    assert formats.labels(mtp) == {"none"}
    assert "not quantised, though the metadata does not exclude them" in formats.why(mtp)
    assert formats.why(TARGET) == "the tensors; metadata: compressed-tensors"


def test_an_mtp_layer_of_several_precisions(tmp_path: Path) -> None:
    """Experts in blocks of fp8, the rest plain, inside NVFP4: what the metadata says of it is about the target."""

    def format_of(name: str) -> QuantizedFormat | None:
        if not mtp(name):
            return None if name == "lm_head" else Nvfp4("modelopt", 0)
        return Fp8("block") if ".experts." in name else None

    formats = resolve(write(tmp_path, format_of, modelopt("NVFP4")))
    assert formats.labels(mtp) == {"fp8_block", "none"}
    assert formats.experts(mtp) == {Fp8("block")}
    assert formats.labels(TARGET) == {"nvfp4", "none"}
    assert "stored as fp8_block, though the metadata says nvfp4" in formats.why(mtp)


def test_mixed_precision_of_modelopt(tmp_path: Path) -> None:
    def format_of(name: str) -> QuantizedFormat | None:
        return (
            Nvfp4("modelopt", 0) if ".experts." in name else None if name == "lm_head" else Fp8("tensor", scale_dims=0)
        )

    layers = {
        n: {"quant_algo": "NVFP4" if ".experts." in n else "FP8"} for n in linear_names(ModelConfig.from_hf(BASE))
    }
    del layers["lm_head"]
    formats = resolve(write(tmp_path, format_of, modelopt("MIXED_PRECISION", quantized_layers=layers)))
    assert formats.labels(TARGET) == {"nvfp4", "fp8_tensor", "none"}
    assert formats.notes == {}


def test_names_as_stored_and_as_fused(tmp_path: Path) -> None:
    def format_of(name: str) -> QuantizedFormat | None:
        return None if name == "lm_head" or "layers.0.self_attn" in name else INT4

    body = "model.language_model."
    ignored = ["lm_head", f"{body}layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"]
    path = write(tmp_path, format_of, ct(INT4, ignored), rename=lambda name: name.replace("model.", body, 1))
    formats = resolve(path)
    assert formats.format_of("model.layers.0.self_attn.v_proj") == UNQUANTIZED
    assert formats.format_of("model.layers.1.self_attn.v_proj") == INT4
    assert formats.notes == {}


def test_gguf_and_tied_heads_are_plain(tmp_path: Path) -> None:
    quantized = resolve(write(tmp_path, all_but_head(INT4), ct(INT4), tie_word_embeddings=True))
    assert quantized.format_of("lm_head") == UNQUANTIZED
    assert Formats().labels() == {"none"}
    assert Formats().format_of("anything") == UNQUANTIZED


Q = "model.layers.0.self_attn.q_proj"


def one(name: str, format: QuantizedFormat | None, others: QuantizedFormat | None) -> Callable[[str], Any]:
    return lambda module: format if module == name else None if module == "lm_head" else others


PROBLEMS = {
    "listed, yet quantised": (
        all_but_head(INT4),
        ct(INT4, ["lm_head", "model.layers.0.self_attn.o_proj"]),
        r"layers\.0\.self_attn\.o_proj\.weight_packed is stored as I32, but ignore entry "
        r"'model\.layers\.0\.self_attn\.o_proj' in config\.json, quantization_config says that it is not quantised",
    ),
    "in no group": (
        all_but_head(INT4),
        ct(INT4, config_groups={"a": {"targets": ["re:.*mlp"], "weights": {"num_bits": 4, "group_size": 16}}}),
        r"weight_packed is stored as I32, but config\.json, quantization_config, in which no group names it, says that",
    ),
    "another scheme": (
        all_but_head(Fp8("channel")),
        ct(INT4),
        r"F8_E4M3 \(fp8_channel\), but .*group_0.* says int4_g16",
    ),
    "another granularity": (
        all_but_head(Fp8("channel")),
        ct(Fp8("tensor")),
        r"\(fp8_channel\), but config_groups\.group_0 in config\.json, quantization_config says fp8_tensor",
    ),
    "another group": (all_but_head(INT4), ct(Int4(32)), r"weight_scale: shape \[32, 3\] does not fit int4_g32"),
    "asymmetric": (all_but_head(Int4(16, False)), ct(INT4), r"\(int4_g16_asym\), but .* says int4_g16"),
    "words without metadata": (all_but_head(INT4), None, r"weight_packed: no metadata says how many bits"),
    "fused": (
        one(Q, None, INT4),
        ct(INT4, ["lm_head", Q]),
        r"k_proj is stored as int4_g16 .* and model\.layers\.0\.self_attn\.q_proj as unquantised; .* alike",
    ),
    "experts": (
        one("model.layers.1.mlp.experts.1.down_proj", None, INT4),
        ct(INT4),
        r"experts\.0\.down_proj is stored as int4_g16 .* and .*experts\.1\.down_proj as unquantised",
    ),
    "unsupported group": (
        all_but_head(INT4),
        ct(INT4, config_groups={"a": {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}}),
        r"weight_packed is stored as I32, and config_groups\.a .*: weights of type int, 8 bits, strategy channel",
    ),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_problems(case: str, tmp_path: Path) -> None:
    format_of, quantization, message = PROBLEMS[case]
    formats = resolve(write(tmp_path, format_of, quantization))
    with pytest.raises(UserError, match=message):
        formats.labels(TARGET)


STRANGE = {
    "awq": ({f"{Q}.qweight": torch.zeros(1, 1).int()}, r"q_proj\.qweight: AWQ or GPTQ, which are not supported"),
    "g_idx": ({f"{Q}.weight_g_idx": torch.zeros(1).int()}, r"weight_g_idx: activation-ordered groups"),
    "pre_quant_scale": ({f"{Q}.pre_quant_scale": torch.zeros(1)}, "NVFP4_AWQ, which is not supported"),
    "int8": ({f"{Q}.weight": torch.zeros(32, 32).char()}, r"q_proj\.weight: stored as I8 beside nothing"),
    "e5m2": ({f"{Q}.weight": torch.zeros(32, 32).to(torch.float8_e5m2)}, "stored as F8_E5M2"),
    "no scale": ({f"{Q}.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn)}, "F8_E4M3, but no weight_scale or"),
    "a scale too many": ({f"{Q}.weight_scale": torch.zeros(1)}, r"weight_scale: its weight is not quantised"),
    "a scale alone": ({"model.layers.0.self_attn.x_proj.weight_scale": torch.zeros(1)}, "no weight that it belongs to"),
    "scale of another shape": (
        {f"{Q}.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn), f"{Q}.weight_scale": torch.zeros(7, 3)},
        r"weight_scale: shape \[7, 3\] fits a weight \[32, 32\] neither as one scale",
    ),
    "integer scale": (
        {f"{Q}.weight": torch.zeros(32, 32).to(torch.float8_e4m3fn), f"{Q}.weight_scale": torch.zeros(1).int()},
        "weight_scale: stored as I32",
    ),
    "mxfp4": (
        {f"{Q}.weight_packed": torch.zeros(32, 16).byte(), f"{Q}.weight_scale": torch.zeros(32, 1).byte()},
        "MXFP4, which is not supported",
    ),
    "a router": (
        {"model.layers.1.mlp.gate.weight": torch.zeros(2, 32).to(torch.float8_e4m3fn)}
        | {"model.layers.1.mlp.gate.weight_scale": torch.zeros(1)},
        r"model\.layers\.1\.mlp\.gate cannot be quantised",
    ),
}


@pytest.mark.parametrize("case", STRANGE)
def test_strange_tensors(case: str, tmp_path: Path) -> None:
    extra, message = STRANGE[case]
    formats = resolve(write(tmp_path, plain, None, extra=extra))
    with pytest.raises(UserError, match=message) as caught:
        formats.labels(TARGET)
    assert "model.safetensors" in str(caught.value)
    assert formats.labels(mtp) == {"none"}


def test_a_problem_of_the_mtp_layer_is_not_the_targets(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.0.up_proj"
    extra = {f"{name}.qweight": torch.zeros(1, 1).int()}
    formats = resolve(write(tmp_path, plain, None, extra=extra))
    assert formats.labels(TARGET) == {"none"}
    with pytest.raises(UserError, match="qweight"):
        formats.labels(mtp)
    with pytest.raises(UserError, match="qweight"):
        formats.common([name])


REFUSED = {
    "awq": (
        {"quant_method": "awq"},
        r"quantisation method 'awq' is not supported; supported are fp8, compressed-tensors",
    ),
    "gptq": ({"quant_method": "gptq"}, "'gptq' is not supported"),
    "mxfp4": ({"quant_method": "mxfp4"}, "'mxfp4' is not supported"),
    "unnamed": ({"bits": 4}, "'unnamed' is not supported"),
    "no object": ([1], r"quantization_config is \[1\]; it must be an object"),
    "e5m2": (fp8(fmt="e5m2"), "fmt 'e5m2' is not supported; supported is e4m3"),
    "block": (fp8(weight_block_size=[128]), r"weight_block_size is \[128\]; it must be two positive whole numbers"),
    "block 0": (fp8(weight_block_size=[0, 128]), "two positive whole numbers"),
    "list": (fp8(modules_to_not_convert="lm_head"), "modules_to_not_convert is 'lm_head'; it must be a list"),
    "regex": (ct(INT4, ["re:["]), r"ignore: 're:\[' is not a regular expression"),
    "groups": (ct(INT4, config_groups=[1]), "config_groups is .* must be an object of groups"),
    "group size": (
        ct(INT4, config_groups={"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group"}}}),
        r"config_groups\.a\.weights: group_size is None",
    ),
    "transform": (ct(INT4, transform_config={"config_groups": {"u": {}}}), "transform_config is not supported"),
    "sparse": (ct(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not supported"),
    "no algorithm": ({"quant_method": "modelopt"}, r"quant_algo is None; it must be one of FP8, .*MIXED_PRECISION"),
    "layers": (modelopt("MIXED_PRECISION", quantized_layers=[1]), "quantized_layers is"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_metadata(case: str, tmp_path: Path) -> None:
    quantization, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        resolve(write(tmp_path, plain, quantization))  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "NVFP4_AWQ", "MXFP8", "W8A8_SQ_PER_CHANNEL"])
def test_algorithms_that_cannot_be_read(algorithm: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"quantization_config": modelopt(algorithm)}))
    with pytest.raises(UserError, match=f"{algorithm}' is not supported; supported are FP8"):
        resolve(tmp_path).labels(TARGET)
    write(tmp_path, all_but_head(Nvfp4("modelopt", 0)), modelopt(algorithm))
    with pytest.raises(UserError, match=f"{algorithm}' is not supported; supported are FP8"):
        resolve(tmp_path).labels(TARGET)


def test_scales_that_are_left_aside(tmp_path: Path) -> None:
    formats = resolve(write(tmp_path, only_target(Nvfp4("modelopt", 0)), modelopt("NVFP4")))
    assert formats.leaves_aside(f"{Q}.input_scale")
    assert formats.leaves_aside("model.layers.0.self_attn.k_proj.k_scale")
    assert not formats.leaves_aside("model.layers.2.self_attn.q_proj.input_scale")
    assert not formats.leaves_aside("lm_head.input_scale")
    assert not formats.leaves_aside("somewhere.else.input_scale")
    assert not formats.leaves_aside(f"{Q}.weight_scale")
    assert not Formats().leaves_aside(f"{Q}.k_scale")
