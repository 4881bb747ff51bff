"""A draft's quantisation is its own checkpoint's, for every format, layout and kind of head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from server.engine.layers.linear import Linear
from server.engine.quantization.write import write_quantized
from server.errors import UserError
from tests.spec.engine_harness import make_engine
from tests.spec.override_models import (
    NEURAL,
    PROMPT,
    Folders,
    draft_runner,
    held,
    modules,
    told,
    without_weights,
    write_folders,
)
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import write_glm4_moe

FORMATS = [
    ("int4_g32", "compressed-tensors", "torch_int4"),
    ("fp8_channel", "compressed-tensors", "torch"),
    ("fp8_block", "fp8", "torch"),
    ("nvfp4", "compressed-tensors", "torch"),
    ("nvfp4", "modelopt", "torch"),
]
"""A scheme, whose names and metadata, and the MoE backend that auto takes for it."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("quantized"))


@pytest.fixture(scope="module")
def plain(folders: Folders) -> list[list[int]]:
    return make_engine(folders.target).generate([PROMPT], max_tokens=8)


def quantized(source: Path, folder: Path, scheme: str = "int4_g32", **options: Any) -> Path:
    write_quantized(source, folder, [(None, scheme)], **options)
    return folder


@pytest.mark.parametrize("proposer", ["draft_model", "eagle3", "mtp_own"])
@pytest.mark.parametrize(("scheme", "layout", "moe"), FORMATS)
def test_a_quantised_draft_of_a_plain_target(
    proposer: str, scheme: str, layout: Any, moe: str, folders: Folders, plain: list[list[int]], tmp_path: Path
) -> None:
    source = folders.drafts[proposer]
    folder = quantized(Path(source["model"]), tmp_path / "draft", scheme, layout=layout)
    engine = make_engine(folders.target, source | {"model": folder})
    assert engine.generate([PROMPT], max_tokens=8) == plain
    assert engine.counts().drafted[0] > 0
    labels = held(draft_runner(engine))["quantization"]
    assert scheme in labels.split("+") and told(engine, "draft")["quantization"] == ("unset", labels, "auto")
    assert held(draft_runner(engine))["moe"] == told(engine, "draft")["moe"][1] == moe
    assert held(engine.built.target)["quantization"] == "none"


@pytest.mark.parametrize(("scheme", "layout", "moe"), FORMATS)
def test_a_checkpoint_that_is_quantised_with_its_mtp_layer(
    scheme: str, layout: Any, moe: str, folders: Folders, tmp_path: Path
) -> None:
    target = quantized(folders.target, tmp_path / "target", scheme, layout=layout)
    engine = make_engine(target, {"method": "mtp"})
    alone = make_engine(target)
    assert engine.generate([PROMPT], max_tokens=8) == alone.generate([PROMPT], max_tokens=8)
    assert held(draft_runner(engine))["quantization"] == scheme
    assert held(draft_runner(engine))["moe"] == moe


@pytest.mark.parametrize("producer", ["eagle", "angelslim", "modelopt", "speculators"])
def test_a_quantised_eagle3_head_of_every_producer(
    producer: Any, folders: Folders, plain: list[list[int]], tmp_path: Path
) -> None:
    head = write_eagle3(folders.target, tmp_path / "plain", producer=producer, boundaries=(0, 1, 2))
    engine = make_engine(folders.target, {"method": "eagle3", "model": quantized(head, tmp_path / "int4")})
    assert engine.generate([PROMPT], max_tokens=8) == plain
    assert held(draft_runner(engine))["quantization"] == "int4_g32+none"


def test_a_target_with_a_quantised_head_lends_it(folders: Folders, tmp_path: Path) -> None:
    glm = write_glm4_moe(tmp_path / "glm", moe_intermediate_size=32, mtp_ends=False)
    target = quantized(glm, tmp_path / "int4", ignore=["re:.*layers\\.3\\..*"])
    engine = make_engine(target, {"method": "mtp"})
    assert engine.generate([PROMPT], max_tokens=8) == make_engine(target).generate([PROMPT], max_tokens=8)
    assert engine.built.target.model.lm_head.weight_format.label == "int4_g32"
    assert held(draft_runner(engine))["quantization"] == "none"


def test_of_several_mtp_layers_only_the_head_that_is_used_counts(tmp_path: Path) -> None:
    glm = write_glm4_moe(tmp_path / "glm", moe_intermediate_size=32, num_nextn_predict_layers=2)
    ignore = ["lm_head", "re:.*layers\\.4\\.shared_head\\.head"]
    target = quantized(glm, tmp_path / "int4", ignore=ignore)
    engine = make_engine(target, {"method": "mtp"})
    assert len(engine.generate([PROMPT], max_tokens=8)[0]) == 8
    assert held(draft_runner(engine))["quantization"] == told(engine, "draft")["quantization"][1] == "int4_g32"


@pytest.mark.parametrize("proposer", NEURAL)
def test_random_weights_are_stored_as_the_metadata_says(proposer: str, folders: Folders, tmp_path: Path) -> None:
    source = folders.drafts[proposer]
    model = Path(source.get("model", folders.target))
    bare = without_weights(quantized(model, tmp_path / "int4"), tmp_path / "bare")
    draft = source | {"model": bare, "load_format": "dummy"}
    engine = make_engine(folders.target, draft)
    assert len(engine.generate([PROMPT], max_tokens=8)[0]) == 8
    assert "int4_g32" in held(draft_runner(engine))["quantization"].split("+")
    assert held(draft_runner(engine))["moe"] == "torch_int4"
    if proposer == "mtp":
        engine = make_engine(bare, {"method": "mtp"}, load_format="dummy")
        assert held(draft_runner(engine))["quantization"] == "int4_g32"


@pytest.mark.parametrize(
    ("ignored", "reason"),
    [
        (["lm_head"], "no metadata says how many bits"),
        (["lm_head", "re:.*layers\\.3\\..*"], "says that it is not quantised"),
    ],
)
def test_a_replaced_head_whose_metadata_is_missing_is_refused_with_that_reason(
    ignored: list[str], reason: str, folders: Folders, tmp_path: Path
) -> None:
    """The MTP layer of another producer, quantised in a way that only its lost metadata would explain."""
    target = quantized(folders.target, tmp_path / "fp8", "fp8_channel", ignore=ignored)
    other = load_file(quantized(folders.target, tmp_path / "int4") / "model.safetensors")
    own = load_file(target / "model.safetensors")
    swapped = {name: tensor for name, tensor in own.items() if ".layers.3." not in name}
    swapped |= {name: tensor for name, tensor in other.items() if ".layers.3." in name}
    save_file(swapped, target / "model.safetensors")
    with pytest.raises(UserError, match=rf"^draft: speculative_config\.model .*layers\.3\..*{reason}"):
        make_engine(target, {"method": "mtp"})
    assert len(make_engine(target).generate([PROMPT], max_tokens=8)[0]) == 8


NAMED = [
    ("int4", "int4_g32", None),
    ("INT4_G32", "int4_g32", None),
    ("compressed-tensors", "int4_g32", None),
    ("auto", "int4_g32", None),
    ("none", None, None),
    ("fp8", "int4_g32", "stored as int4_g32 (metadata: compressed-tensors)"),
    ("none", "int4_g32", "stored as int4_g32 (metadata: compressed-tensors)"),
    ("int4", None, "stored as none (metadata: none). Leave it out, or name one of: auto, none."),
]
"""What the user says, how the draft's experts are stored, and the reason why that stops the start."""


@pytest.mark.parametrize(("named", "scheme", "reason"), NAMED)
def test_a_named_quantisation_is_checked(
    named: str, scheme: str | None, reason: str | None, folders: Folders, tmp_path: Path
) -> None:
    alone = Path(folders.drafts["mtp_own"]["model"])
    model = quantized(alone, tmp_path / "draft", scheme) if scheme else alone
    draft = {"method": "mtp", "model": model, "quantization": named}
    if reason is None:
        engine = make_engine(folders.target, draft)
        source = "auto" if named == "auto" else "explicit"
        assert told(engine, "draft")["quantization"][1:] == (held(draft_runner(engine))["quantization"], source)
        return
    with pytest.raises(UserError) as caught:
        make_engine(folders.target, draft)
    assert str(caught.value).startswith(f"draft: speculative_config.quantization {named!r}: ")
    assert reason in str(caught.value)


def test_layers_of_one_head_keep_their_own_formats(folders: Folders, tmp_path: Path) -> None:
    target = tmp_path / "mixed"
    schemes = [
        ("re:.*layers\\.3\\.mlp\\.experts\\..*", "int4_g32"),
        ("re:.*layers\\.3\\.self_attn\\..*", "fp8_channel"),
    ]
    ignore = ["lm_head", "re:.*layers\\.[012]\\..*", "re:.*eh_proj", "re:.*shared_.*"]
    write_quantized(folders.target, target, schemes, ignore=ignore)
    engine = make_engine(target, {"method": "mtp"})
    assert held(engine.built.target)["quantization"] == "none"
    assert held(draft_runner(engine))["quantization"] == "fp8_channel+int4_g32+none"
    formats = {
        tuple(module.shards): module.weight_format.label for module in modules(draft_runner(engine).model, Linear)
    }
    assert formats[("q_proj", "k_proj", "v_proj")] == formats[("o_proj",)] == "fp8_channel"
    assert formats[("eh_proj",)] == formats[("head",)] == "none"
    assert told(engine, "draft")["moe"][1] == "torch_int4" and told(engine, "target")["moe"][1] == "grouped_mm"
