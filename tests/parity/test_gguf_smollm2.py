"""The embedded model: every tensor against gguf-py's numbers, and names and config against transformers' reading."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import transformers

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.locate import locate
from server.engine.loading.gguf_source import GGUFWeight, gguf_sources


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return locate(None)


@pytest.fixture(scope="module")
def sources(checkpoint: Checkpoint) -> dict[str, GGUFWeight]:
    return {source.name: source for source in gguf_sources(read_gguf_header(checkpoint.path), checkpoint.config)}


def test_config_is_that_of_smollm2(checkpoint: Checkpoint) -> None:
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 2,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(1e-5)


def test_names_and_shapes_are_those_of_transformers(checkpoint: Checkpoint, sources: dict[str, GGUFWeight]) -> None:
    config = transformers.LlamaConfig(**{**checkpoint.config, "rope_scaling": None})
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: source.shape for name, source in sources.items()} == expected


def test_tensors_equal_gguf_py(checkpoint: Checkpoint, sources: dict[str, GGUFWeight]) -> None:
    """Un-permuted by gguf-py's rule run backwards; transformers with accelerate loads these very numbers."""
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(checkpoint.path).tensors}
    assert {source.file_name for source in sources.values()} == reader.keys()
    for source in sources.values():
        if source.file_name.startswith("blk.") and source.file_name.split(".")[1] not in ("0", "17", "29"):
            continue
        stored = reader[source.file_name]
        rows = min(len(stored.data), 4096)  # gguf-py takes seconds for the whole embedding
        expected = gguf.quants.dequantize(stored.data[:rows], stored.tensor_type)
        heads = {"attn_q": 9, "attn_k": 3}.get(source.file_name.split(".")[-2])
        if heads is not None:
            expected = expected.reshape(heads, -1, 2, 576).swapaxes(1, 2).reshape(expected.shape)
        target = torch.empty(source.shape)
        source.copy_to(target)
        assert np.array_equal(target[:rows].numpy(), expected), source.name
