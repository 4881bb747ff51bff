"""Which kind of draft a checkpoint is: by its tensors, whatever it calls itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.checkpoint.headers import read_headers
from server.checkpoint.locate import locate
from server.checkpoint.tensor_header import TensorHeader
from server.engine.models.draft_kind import draft_kind
from server.engine.models.nextn_names import hf_names, nextn_layers
from server.errors import UserError
from tests.spec.tiny_eagle3 import Producer, write_eagle3
from tests.spec.tiny_models import mtp_alone, write_glm4_moe, write_llama, write_qwen3_moe

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LAYER = ("layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight")


def headers(*names: str) -> dict[str, TensorHeader]:
    return {name: TensorHeader(name, Path("x"), "BF16", (2, 2), 0, 8) for name in names}


def kind_of(folder: Path) -> str:
    checkpoint = locate(str(folder))
    return draft_kind(checkpoint.config, read_headers(checkpoint))


@pytest.mark.parametrize("producer", ["eagle", "specforge", "angelslim", "modelopt", "speculators"])
def test_eagle3_of_every_producer(producer: Producer, tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    assert kind_of(write_eagle3(target, tmp_path / "draft", producer=producer)) == "eagle3"


def test_a_name_in_front_of_all_tensors_does_not_matter() -> None:
    assert draft_kind(LLAMA, headers("model.fc.weight", "model.layers.0.hidden_norm.weight", "lm_head.weight")) == (
        "eagle3"
    )


def test_whole_models_and_mtp_layers(tmp_path: Path) -> None:
    assert kind_of(write_llama(tmp_path / "llama")) == "draft_model"
    assert kind_of(write_qwen3_moe(tmp_path / "qwen")) == "draft_model"
    glm = write_glm4_moe(tmp_path / "glm")
    assert kind_of(glm) == "mtp"
    assert kind_of(mtp_alone(glm, tmp_path / "alone")) == "mtp"
    # The config still promises a layer; the tensors decide.
    assert kind_of(write_glm4_moe(tmp_path / "plain", num_nextn_predict_layers=0)) == "draft_model"


def test_mtp_layers_in_a_gguf_and_in_a_multimodal_checkpoint() -> None:
    gguf = headers("blk.0.attn_q.weight", "blk.2.nextn.eh_proj.weight", "blk.2.nextn.enorm.weight", "output.weight")
    assert draft_kind({}, gguf) == "mtp"
    assert nextn_layers(gguf) == {2: frozenset({"eh_proj.weight", "enorm.weight"})}
    nested = headers("model.language_model.layers.4.eh_proj.weight", "model.visual.patch.weight")
    assert nextn_layers(nested) == {4: frozenset({"eh_proj.weight"})}
    assert draft_kind({}, headers("blk.0.attn_q.weight")) == "draft_model"


def test_the_ends_of_a_gguf_have_their_names_too() -> None:
    ends = headers("token_embd.weight", "output_norm.weight", "output.weight", "blk.0.attn_q.weight")
    names = {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.self_attn.q_proj.weight",
    }
    assert hf_names(ends) == names
    assert hf_names(headers("output.weight")) == {"output.weight"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("fc.weight", "fc.bias", *LAYER), "EAGLE-1 or EAGLE-2"),
        (("fc.weight", "mask_hidden", "layers.0.hidden_norm.weight", *LAYER), "mask_hidden"),
        (("fc.weight", "hidden_norm.weight", "norm.weight", *LAYER), "DFlash"),
        (("fc.weight", "layers.0.hidden_norm.weight", "layers.0.self_attn.kv_a_proj_with_mqa.weight"), "latent"),
        (("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"), r"another family \(tensor mtp\.fc\.weight\)"),
        (("model.mtp_layers.0.input_proj.weight",), "another family"),
        (("0.linear.weight",), r"no known kind of draft \(0\.linear\.weight"),
    ],
)
def test_other_drafts_are_refused_by_what_they_hold(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        draft_kind(LLAMA, headers(*names))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (LLAMA, "draft_model"),
        (LLAMA | {"draft_vocab_size": 32000}, "eagle3"),
        (LLAMA | {"draft_vocab_size": None}, "draft_model"),
        (LLAMA | {"eagle_config": {}}, "eagle3"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
        ({"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}, "eagle3"),
        ({"architectures": ["Glm4MoeMTPModel"]}, "mtp"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, "mtp"),
    ],
)
def test_without_tensors_the_config_tells(config: dict[str, Any], kind: str) -> None:
    assert draft_kind(config, {}) == kind


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"speculators_model_type": "peagle"}, "P-EAGLE"),
        ({"speculators_model_type": "mtp"}, "speculators"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "EAGLE-1"),
    ],
)
def test_without_tensors_other_drafts_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        draft_kind(config, {})
