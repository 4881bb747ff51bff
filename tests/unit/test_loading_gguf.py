"""Loading from GGUF files: renamed, un-permuted, dequantised, experts taken apart."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from server.checkpoint.checkpoint import Checkpoint
from server.engine.loading.load import load_weights
from server.errors import UserError

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 64
CONFIG = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}


class Targets:
    """A model that is only its targets."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        self.targets = {name: torch.full(shape, 7.0, dtype=dtype) for name, shape in shapes.items()}

    def weight_targets(self) -> dict[str, Tensor]:
        return self.targets

    def ignored_weight(self, name: str) -> bool:
        return name == "lm_head.weight"

    def finish_loading(self) -> None:
        pass


def write(file: Path, architecture: str, tensors: dict[str, tuple[np.ndarray, Kind]]) -> Checkpoint:
    writer = gguf.GGUFWriter(file, architecture)
    for name, (array, kind) in tensors.items():
        plain = kind in (Kind.F32, Kind.F16)
        data = array.astype(np.float16) if kind is Kind.F16 else array
        writer.add_tensor(name, data if plain else gguf.quants.quantize(array, kind), raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Checkpoint(file, "gguf", CONFIG, {}, str(file), "hash")


def load(checkpoint: Checkpoint, model: Targets) -> dict[str, Tensor]:
    load_weights(model, checkpoint, "auto", 0, lambda done, total: None)
    return model.targets


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


def permuted(array: np.ndarray, heads: int) -> np.ndarray:
    """As llama.cpp's converter regroups the rows of q and k: halves of a head to pairs."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_every_type(tmp_path: Path, kind: Kind) -> None:
    array = normal(40, HIDDEN)
    checkpoint = write(tmp_path / "m.gguf", "qwen3", {"token_embd.weight": (array, kind)})
    model = Targets({"model.embed_tokens.weight": array.shape}, torch.bfloat16)
    stored = array if kind is Kind.F32 else array.astype(np.float16).astype(np.float32)
    if kind not in (Kind.F32, Kind.F16):
        stored = gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)
    expected = torch.from_numpy(stored).bfloat16()
    assert torch.equal(load(checkpoint, model)["model.embed_tokens.weight"], expected)


def test_llama_rows_are_put_back(tmp_path: Path) -> None:
    q, k, v = normal(HEADS * HEAD_DIM, HIDDEN), normal(KV_HEADS * HEAD_DIM, HIDDEN), normal(KV_HEADS * HEAD_DIM, HIDDEN)
    bias = normal(KV_HEADS * HEAD_DIM)
    checkpoint = write(
        tmp_path / "m.gguf",
        "llama",
        {
            "blk.0.attn_q.weight": (permuted(q, HEADS), Kind.F32),
            "blk.0.attn_k.weight": (permuted(k, KV_HEADS), Kind.F32),
            "blk.0.attn_k.bias": (permuted(bias, KV_HEADS), Kind.F32),
            "blk.0.attn_v.weight": (v, Kind.F32),
        },
    )
    prefix = "model.layers.0.self_attn"
    shapes = {
        f"{prefix}.q_proj.weight": q.shape,
        f"{prefix}.k_proj.weight": k.shape,
        f"{prefix}.v_proj.weight": v.shape,
    }
    loaded = load(checkpoint, Targets(shapes | {f"{prefix}.k_proj.bias": bias.shape}))
    for name, expected in (("q_proj.weight", q), ("k_proj.weight", k), ("v_proj.weight", v), ("k_proj.bias", bias)):
        assert np.array_equal(loaded[f"{prefix}.{name}"].numpy(), expected), name


def test_other_architectures_are_not_permuted(tmp_path: Path) -> None:
    q = normal(HEADS * HEAD_DIM, HIDDEN)
    checkpoint = write(tmp_path / "m.gguf", "qwen2", {"blk.0.attn_q.weight": (q, Kind.F32)})
    loaded = load(checkpoint, Targets({"model.layers.0.self_attn.q_proj.weight": q.shape}))
    assert np.array_equal(loaded["model.layers.0.self_attn.q_proj.weight"].numpy(), q)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q8_0])
def test_experts_are_taken_apart(tmp_path: Path, kind: Kind) -> None:
    stacked = normal(3, 16, HIDDEN)
    checkpoint = write(tmp_path / "m.gguf", "qwen3moe", {"blk.1.ffn_gate_exps.weight": (stacked, kind)})
    names = [f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in range(3)]
    loaded = load(checkpoint, Targets(dict.fromkeys(names, (16, HIDDEN))))
    expected = stacked if kind is Kind.F32 else gguf.quants.dequantize(gguf.quants.quantize(stacked, kind), kind)
    for expert, name in enumerate(names):
        assert np.array_equal(loaded[name].numpy(), expected[expert])


def test_a_tensor_larger_than_a_chunk(tmp_path: Path) -> None:
    array = np.resize(normal(1000), (1100, 1024)).astype(np.float32)
    checkpoint = write(tmp_path / "m.gguf", "qwen3", {"token_embd.weight": (array, Kind.F32)})
    loaded = load(checkpoint, Targets({"model.embed_tokens.weight": array.shape}))
    assert np.array_equal(loaded["model.embed_tokens.weight"].numpy(), array)


def test_tied_and_rope_tensors_are_left_aside(tmp_path: Path) -> None:
    tensors = {
        "output_norm.weight": (np.ones(HIDDEN, np.float32), Kind.F32),
        "output.weight": (np.full((4, HIDDEN), np.nan, np.float32), Kind.F32),
        "rope_freqs.weight": (np.ones(4, np.float32), Kind.F32),
    }
    load(write(tmp_path / "m.gguf", "llama", tensors), Targets({"model.norm.weight": (HIDDEN,)}))


NORM = {"output_norm.weight": (np.ones(HIDDEN, np.float32), Kind.F32)}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, r"lacks tensor model\.norm\.weight"),
        (
            NORM | {"blk.0.attn_sinks.weight": NORM["output_norm.weight"]},
            r"blk\.0\.attn_sinks\.weight is unknown in .* llama",
        ),
        (NORM | {"token_embd.weight": (normal(4, 64), Kind.F32)}, r"holds tensor token_embd\.weight, .* no place"),
        ({"output_norm.weight": (normal(32), Kind.F32)}, r"output_norm\.weight has shape \[32\]"),
        (
            {"output_norm.weight": (np.full(HIDDEN, np.nan, np.float32), Kind.F32)},
            r"output_norm\.weight holds 64 values",
        ),
        ({"output_norm.weight": (normal(HIDDEN), Kind.Q5_0)}, r"output_norm\.weight has type Q5_0; supported types"),
        (
            NORM | {"blk.0.attn_k.weight": (normal(6, 64), Kind.F32)},
            r"attn_k\.weight has 6 rows, which 2 heads cannot share",
        ),
    ],
)
def test_refused(tmp_path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], message: str) -> None:
    checkpoint = write(tmp_path / "m.gguf", "llama", tensors)
    with pytest.raises(UserError, match=message) as caught:
        load(checkpoint, Targets({"model.norm.weight": (HIDDEN,)}))
    assert "m.gguf" in str(caught.value)


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    data = gguf.quants.quantize(normal(4, HIDDEN), Kind.Q4_1)
    data[2, :2] = np.frombuffer(np.float16("nan").tobytes(), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("token_embd.weight", data, raw_dtype=Kind.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = Checkpoint(tmp_path / "m.gguf", "gguf", CONFIG, {}, "", "")
    with pytest.raises(UserError, match=r"token_embd\.weight holds 32 values that are NaN"):
        load(checkpoint, Targets({"model.embed_tokens.weight": (4, HIDDEN)}))


def test_a_file_cut_by_one_kibibyte(tmp_path: Path) -> None:
    checkpoint = write(tmp_path / "m.gguf", "llama", {"token_embd.weight": (normal(40, HIDDEN), Kind.F32)})
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:-1024])
    with pytest.raises(UserError, match=r"m\.gguf .*truncated: tensor token_embd\.weight"):
        load(checkpoint, Targets({"model.embed_tokens.weight": (40, HIDDEN)}))
