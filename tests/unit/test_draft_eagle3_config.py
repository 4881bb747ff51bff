"""An EAGLE-3 head's folder: what the tensors decide, what the config decides, and what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from server.checkpoint.headers import read_headers
from server.checkpoint.locate import locate
from server.engine.attention.base import AttentionNeed
from server.engine.attention.torch import TorchAttention
from server.engine.layers.context import BuildContext
from server.engine.layers.embedding import VocabEmbedding
from server.engine.layers.linear import Linear
from server.engine.models.config import ModelConfig
from server.engine.models.draft import Borrowed
from server.engine.models.eagle3 import Eagle3Draft
from server.engine.models.eagle3_config import Eagle3Config
from server.engine.models.recurrent import build_recurrent
from server.engine.parallel import ParallelGroup
from server.errors import UserError
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import changed_copy, config_of, write_llama

TARGET = ModelConfig.from_hf(
    {"architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 32, "intermediate_size": 48}
    | {"num_hidden_layers": 8, "num_attention_heads": 4, "rope_theta": 77777.0, "head_dim": 16}
)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "target", num_hidden_layers=8)


def read(folder: Path, config: ModelConfig = TARGET, override: tuple[int, ...] | None = None) -> Eagle3Config:
    checkpoint = locate(str(folder))
    return Eagle3Config.read(checkpoint.config, read_headers(checkpoint), config, override)


def edit(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in (config_of(folder) | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_a_plain_head_is(target: Path, tmp_path: Path) -> None:
    config = read(write_eagle3(target, tmp_path / "draft", producer="eagle", boundaries=None))
    assert config.capture == (2, 4, 5)
    assert (config.embedding, config.head) == ("target's", "own")
    assert (config.vocab.size, config.aux_norm, config.norm_before_residual) == (96, "none", False)
    assert config.model.rope.theta == 10000.0  # never the target's
    assert (config.model.num_layers, config.model.vocab_size, config.model.qk_norm) == (1, 260, False)
    assert config.file_module("layers.0") == "midlayer"
    assert config.notes == (
        "hidden states: boundaries 2, N/2, N-3 of N = 8, since the head's config lists none",
        "draft vocabulary: 96 of 260 tokens, d2t holds offsets",
    )


def test_left_overs_of_the_targets_config_do_not_matter(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path / "draft", qwen=True, own_embedding=True, num_layers=2)
    left = {"num_experts": 128, "decoder_sparse_step": 1, "num_experts_per_tok": 8, "norm_topk_prob": True}
    for model_type in ("llama", "qwen3", "qwen3_moe", "glm4_moe", "deepseek_v3"):
        config = read(edit(folder, model_type=model_type, num_hidden_layers=48, attention_bias=True, **left))
        model = config.model
        assert (model.num_layers, model.moe, model.qk_norm, model.qkv_bias, model.o_bias) == (
            2,
            None,
            True,
            False,
            False,
        )


def test_speculators_layer_is_a_difference_to_its_class(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path / "draft", producer="speculators", qwen=True)
    nested = config_of(folder)["transformer_layer_config"]
    for name in ("head_dim", "rms_norm_eps", "hidden_act", "model_type"):
        nested.pop(name)
    model = read(edit(folder, transformer_layer_config=nested)).model
    assert (model.head_dim, model.rms_norm_eps) == (128, 1e-6)  # Qwen3's
    plain = read(edit(folder, transformer_layer_config=nested | {"model_type": "llama"})).model
    assert plain.head_dim == 8  # hidden_size / heads, as Llama has it


@pytest.mark.parametrize("size", [None, 96, 7, "absent"])
def test_the_head_in_the_file_gives_the_draft_vocabulary(size: Any, target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path / "draft")
    assert read(edit(folder, draft_vocab_size=size)).vocab.size == 96


def test_a_draft_vocabulary_of_null_is_the_targets(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path / "draft", draft_vocab_size=None, own_head=False)
    config = read(folder)
    assert (config.vocab.size, config.vocab.target_ids, config.head) == (260, None, "target's")


def test_tied_is_a_left_over_where_the_file_has_a_head(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path / "draft", own_embedding=True, tie_word_embeddings=True)
    assert read(folder).head == "own"


def test_the_user_names_layers(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path / "draft")
    assert read(folder, override=(1, 4, 8)).capture == (1, 4, 8)
    with pytest.raises(
        UserError, match=r"hidden states of 3 layers, but 2 are chosen, \[1, 4\] \(boundaries, as asked"
    ):
        read(folder, override=(1, 4))


@pytest.mark.parametrize(
    ("options", "target_changes", "message"),
    [
        ({}, {"hidden_size": 40}, "takes 96 inputs, no multiple of the target's hidden_size 40"),
        ({}, {"hidden_size": 48}, "hidden states of 2 layers, but 3 are chosen"),
        ({"target_hidden_size": 64}, {}, "target_hidden_size is 64; it must be 32"),
        ({"hidden_size": 24}, {}, "cannot borrow the target's: its hidden_size 24"),
        ({"own_head": False}, {}, "no lm_head.weight, and cannot borrow the target's: it scores 96"),
        ({"own_embedding": True}, {"vocab_size": 300}, "embeds 260 tokens, but the target's vocabulary has 300"),
        ({}, {"vocab_size": 90}, "scores 96 tokens, more than the target's vocabulary of 90"),
        ({"parallel_draft_step": 4}, {}, "parallel_draft_step is 4; it must be 1"),
        ({"use_last_layernorm": False}, {}, "use_last_layernorm is False"),
        ({"hidden_act": "gelu"}, {}, "hidden_act is 'gelu'"),
        ({"aux_norm": "chunks", "norm_before_fc": True}, {}, "exclude each other"),
        ({"draft_vocab_size": None}, {"vocab_size": 270}, "scores 260 of the target's 270 tokens"),
    ],
)
def test_heads_that_do_not_fit(
    options: dict[str, Any], target_changes: dict[str, Any], message: str, target: Path, tmp_path: Path
) -> None:
    folder = write_eagle3(target, tmp_path / "draft", producer="eagle", boundaries=(2, 4, 5), **options)
    with pytest.raises(UserError, match=message):
        read(folder, replace(TARGET, **target_changes))


def test_two_names_for_one_tensor(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(target, tmp_path / "draft")
    headers = dict(read_headers(locate(str(folder))))
    headers["layers.0.hidden_norm.weight"] = headers["midlayer.hidden_norm.weight"]
    with pytest.raises(UserError, match="midlayer.hidden_norm.weight.*layers.0.hidden_norm.weight.*same tensor"):
        Eagle3Config.read(config_of(folder), headers, TARGET)


def test_without_fc(target: Path, tmp_path: Path) -> None:
    folder = changed_copy(
        write_eagle3(target, tmp_path / "whole"), tmp_path / "draft", lambda n, t: None if n == "fc.weight" else t
    )
    with pytest.raises(UserError, match="lacks fc.weight"):
        read(folder)
    config = read(edit(folder, eagle_config={"use_aux_hidden_state": False}))
    assert config.capture == ()
    with pytest.raises(UserError, match="captures no layers"):
        read(folder, override=(1, 2, 3))


def context(dtype: torch.dtype = torch.float32, group: ParallelGroup | None = None) -> BuildContext:
    cpu = torch.device("cpu")
    attention = TorchAttention(AttentionNeed(cpu, dtype, dtype, 4, 2, 16), 1)
    return BuildContext(dtype, cpu, attention, "torch", group or ParallelGroup())


def borrowed(dtype: torch.dtype = torch.float32) -> Borrowed:
    return Borrowed(VocabEmbedding(260, 32, context(dtype)), Linear(32, {"lm_head": 260}, context(dtype)))


def test_random_weights_need_no_file(target: Path, tmp_path: Path) -> None:
    for producer in ("eagle", "specforge", "speculators"):
        folder = write_eagle3(target, tmp_path / producer, producer=producer, aux_norm="chunks")
        config = Eagle3Config.read(config_of(folder), {}, TARGET)
        assert (config.model.num_layers, config.vocab.size, config.aux_norm) == (1, 96, "chunks")
        draft = build_recurrent(config, context(), borrowed())
        assert draft.target_ids is None
        assert "fc_norm.2.weight" in draft.weight_targets()


def test_borrowing_needs_the_targets_dtype(target: Path, tmp_path: Path) -> None:
    config = read(write_eagle3(target, tmp_path / "draft"))
    with pytest.raises(UserError, match="are bfloat16, but is to run in float32"):
        build_recurrent(config, context(), borrowed(torch.bfloat16))
    own = read(write_eagle3(target, tmp_path / "own", own_embedding=True))
    assert isinstance(build_recurrent(own, context(), borrowed(torch.bfloat16)), Eagle3Draft)


def test_more_than_one_rank(target: Path, tmp_path: Path) -> None:
    config = read(write_eagle3(target, tmp_path / "draft"))
    with pytest.raises(UserError, match="draft's tensor_parallel_size = 2"):
        build_recurrent(config, context(group=ParallelGroup(0, 2)), borrowed())


def test_names_in_the_file_are_the_files(target: Path, tmp_path: Path) -> None:
    draft = build_recurrent(read(write_eagle3(target, tmp_path / "draft")), context(), borrowed())
    targets = draft.weight_targets()
    assert "midlayer.self_attn.q_proj.weight" in targets
    assert targets["midlayer.self_attn.q_proj.weight"].shape == (64, 64)
    assert draft.ignored_weight("d2t") and draft.ignored_weight("t2d")
    assert not draft.ignored_weight("midlayer.surprise.weight")
