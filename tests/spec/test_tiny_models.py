"""The tiny models are what they say: they load, are the same each time, and differ where they should."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from server.checkpoint.headers import read_headers
from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import load_tokenizer
from server.engine.attention.base import AttentionNeed
from server.engine.attention.torch import TorchAttention
from server.engine.layers.context import BuildContext
from server.engine.loading.load import load_weights
from server.engine.models.config import ModelConfig
from server.engine.models.decoder import CausalLM, build_model
from server.engine.parallel import ParallelGroup
from tests.spec import tiny_models
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import EOS, VOCAB_SIZE, noisy_copy, self_draft, tensors_of, write_llama

WRITERS = {name: getattr(tiny_models, f"write_{name}") for name in ("llama", "qwen3", "qwen3_moe", "glm4_moe")}
Writer = Callable[..., Path]


def load(folder: Path) -> CausalLM:
    checkpoint = locate(str(folder))
    config = ModelConfig.from_hf(checkpoint.config)
    cpu, dtype = torch.device("cpu"), torch.float32
    need = AttentionNeed(cpu, dtype, dtype, config.num_heads, config.num_kv_heads, config.head_dim)
    context = BuildContext(dtype, cpu, TorchAttention(need, config.num_layers), "torch", ParallelGroup())
    model = build_model(config, context)
    load_weights(model, checkpoint, "auto", 0, lambda done, total: None)
    return model


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_targets_load_and_are_the_same_for_the_same_seed(write: Writer, tmp_path: Path) -> None:
    load(write(tmp_path / "a"))
    again, other = tensors_of(write(tmp_path / "b")), tensors_of(write(tmp_path / "c", seed=1))
    for name, tensor in tensors_of(tmp_path / "a").items():
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
    load(write(tmp_path / "tied", tie_word_embeddings=True, **({"mtp_ends": False} if "glm" in str(write) else {})))


def test_the_tokenizer_covers_the_vocabulary(tmp_path: Path) -> None:
    files = load_tokenizer(locate(str(write_llama(tmp_path / "a"))))
    assert files.tokenizer.get_vocab_size() == VOCAB_SIZE
    text = "A naïve 漢字 🙂\n"
    ids = files.tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert files.tokenizer.decode(ids) == text
    assert files.eos_token_ids == (files.tokenizer.token_to_id(EOS),)


def test_copies(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    copy, noisy = tensors_of(self_draft(target, tmp_path / "s")), tensors_of(noisy_copy(target, tmp_path / "p", 0.1))
    for name, tensor in tensors_of(target).items():
        assert torch.equal(tensor, copy[name])
        assert torch.equal(tensor, noisy[name]) == (tensor.dim() == 1)
        if tensor.dim() == 2:
            assert float((noisy[name] - tensor).std() / tensor.std()) == pytest.approx(0.1, rel=0.1)


def test_heads_hold_what_their_producers_write(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target", num_hidden_layers=8)
    names = {
        producer: set(read_headers(locate(str(write_eagle3(target, tmp_path / producer, producer=producer)))))
        for producer in ("eagle", "specforge", "modelopt", "speculators")
    }
    assert names["eagle"] == names["specforge"]
    assert "midlayer.hidden_norm.weight" in names["eagle"]
    assert "layers.0.hidden_norm.weight" in names["speculators"]
    assert names["speculators"] - names["modelopt"] == {"t2d"}
