"""Which MTP layers a checkpoint holds, and what becomes of those that it promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.checkpoint.tensor_header import TensorHeader
from server.engine.models.config import ModelConfig
from server.engine.models.mtp_config import MTPConfig
from server.errors import UserError
from tests.spec.tiny_models import GLM4_MOE, LLAMA

TARGET = ModelConfig.from_hf(GLM4_MOE)
ENDS = ("embed_tokens", "shared_head.head")
TOP = ("model.embed_tokens", "lm_head", "model.layers.0.input_layernorm")


def headers(*modules: str) -> dict[str, TensorHeader]:
    names = [f"{module}.weight" for module in modules]
    return {name: TensorHeader(name, Path("x"), "F32", (2, 2), 0, 16) for name in names}


def layer(index: int, *parts: str) -> list[str]:
    return [f"model.layers.{index}.{part}" for part in ("eh_proj", "enorm", "hnorm", *parts)]


def read(modules: list[str], **changes: Any) -> MTPConfig:
    return MTPConfig.read(GLM4_MOE | changes, headers(*modules), TARGET)


def test_embedded_with_copies_of_the_ends() -> None:
    config = read([*TOP, *layer(3, *ENDS)])
    assert (config.first, config.embedded, config.model.num_layers) == (3, True, 1)
    assert config.embedding == "model.layers.3.embed_tokens.weight"
    assert config.head == "model.layers.3.shared_head.head.weight"
    assert config.model.moe is not None
    assert config.model.moe.layers == (0,)
    assert config.capture == ()


def test_embedded_without_copies_borrows() -> None:
    config = read([*TOP, *layer(3)])
    assert (config.embedding, config.head) == (None, None)
    assert "target" in config.notes[1]


def test_a_folder_of_its_own_keeps_what_it_has() -> None:
    config = read([*layer(3), "lm_head", "model.embed_tokens"])
    assert not config.embedded
    assert (config.embedding, config.head) == ("model.embed_tokens.weight", "lm_head.weight")
    # Some exporters count from 0.
    renumbered = read(layer(0, *ENDS), num_hidden_layers=1)
    assert (renumbered.first, renumbered.embedded) == (0, False)


@pytest.mark.parametrize(
    "names",
    [{"architectures": ["Glm4MoeForCausalLMNextN"]}, {"architectures": ["X"], "model_type": "glm4_moe_mtp"}],
)
def test_a_class_of_its_own_is_read_as_its_family(names: dict[str, Any]) -> None:
    assert read(layer(3), **names).model.architecture == "Glm4MoeForCausalLM"


def test_every_mtp_layer_has_experts() -> None:
    config = read([*layer(3), *layer(4)], num_nextn_predict_layers=2, first_k_dense_replace=3)
    assert config.model.moe is not None
    assert (config.model.num_layers, config.model.moe.layers) == (2, (0, 1))


def test_a_family_without_experts_has_dense_mtp_layers() -> None:
    config = MTPConfig.read(LLAMA, headers(*layer(3)), ModelConfig.from_hf(LLAMA))
    assert config.model.moe is None


@pytest.mark.parametrize(
    ("modules", "changes", "message"),
    [
        (list(TOP), {}, r"^no MTP weights: the config promises 1, but .*model\.layers\.3\.eh_proj\.weight"),
        (list(TOP), {"num_nextn_predict_layers": 0}, "^no MTP weights: the config promises none"),
        ([*TOP, *layer(3)], {"num_nextn_predict_layers": 2}, "promises 2, and the checkpoint holds layer 3"),
        ([*TOP, *layer(3), *layer(5)], {"num_nextn_predict_layers": 2}, "holds layer 3, 5"),
        (layer(3), {"hidden_size": 64}, "hidden_size 64 is not the target's 32"),
        (layer(3), {"vocab_size": 300}, "vocab_size 300 is not the target's 260"),
        (layer(3), {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}, "DeepseekV3"),
    ],
)
def test_what_cannot_draft(modules: list[str], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(modules, **changes)


def test_random_weights_follow_the_config() -> None:
    config = read([], num_nextn_predict_layers=2)
    assert (config.model.num_layers, config.first, config.embedding, config.head) == (2, 3, None, None)
    with pytest.raises(UserError, match="no MTP weights"):
        read([], num_nextn_predict_layers=0)
