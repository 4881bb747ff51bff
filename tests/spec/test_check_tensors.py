"""`outrider check` finds by headers what a start would find in the files, for every proposer and format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.checkpoint.locate import locate
from server.config import Settings
from server.engine.plan import check_plan
from server.engine.quantization.write import write_quantized
from server.errors import UserError
from tests.spec.engine_harness import make_engine
from tests.spec.override_models import Folders, without_weights, write_folders
from tests.spec.tiny_models import self_draft, write_glm4_moe

PART = {
    "draft_model": "model.layers.1.self_attn.o_proj.weight",
    "eagle3": "midlayer.self_attn.o_proj.weight",
    "mtp": "model.layers.3.eh_proj.weight",
    "mtp_own": "model.layers.3.hnorm.weight",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("tensors"))


def errors(target: Path, speculative: dict[str, Any] | None, **settings: Any) -> list[str]:
    """Of the check; a start that is tried must fail in the same words, or not at all."""
    options = {"model": str(target), "dtype": "float32", "speculative": speculative} | settings
    found = list(check_plan(Settings.model_validate(options)).errors)
    try:
        make_engine(target, speculative, **settings)
    except UserError as error:
        assert found == [str(error)]
    else:
        assert found == []
    return found


def changed(source: Path, folder: Path, name: str, change: str) -> Path:
    self_draft(source, folder)
    tensors = load_file(folder / "model.safetensors")
    if change == "missing":
        del tensors[name]
    elif change == "left over":
        tensors[name.replace(".weight", "_twin.weight")] = tensors[name].clone()
    elif change == "another type":
        tensors[name] = tensors[name].to(torch.int32)
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("change", ["missing", "left over", "misshapen", "another type"])
@pytest.mark.parametrize("proposer", PART)
def test_a_drafts_wrong_tensor_is_found(proposer: str, change: str, folders: Folders, tmp_path: Path) -> None:
    keys = folders.drafts[proposer]
    folder = changed(Path(keys.get("model", folders.target)), tmp_path / "draft", PART[proposer], change)
    target, keys = (folder, keys) if proposer == "mtp" else (folders.target, keys | {"model": str(folder)})
    (message,) = errors(target, keys)
    assert message.startswith("draft: speculative_config.")
    assert PART[proposer].removesuffix(".weight").split(".")[-1] in message


@pytest.mark.parametrize("change", ["missing", "left over", "misshapen", "another type"])
def test_a_targets_wrong_tensor_is_found(change: str, folders: Folders, tmp_path: Path) -> None:
    folder = changed(folders.target, tmp_path / "target", "model.layers.1.input_layernorm.weight", change)
    (message,) = errors(folder, None)
    assert "draft" not in message and "model.layers.1.input_layernorm" in message
    assert errors(folder, None, load_format="dummy") == []


@pytest.mark.parametrize(
    ("scheme", "key", "value", "lacking"),
    [
        ("int4_g32", "num_hidden_layers", 4, "model.layers.3.mlp.experts."),
        (None, "num_hidden_layers", 4, "model.layers.3."),
        ("int4_g32", "n_routed_experts", 9, "e_score_correction_bias has shape [6]"),
        (None, "n_routed_experts", 9, "e_score_correction_bias has shape [6]"),
    ],
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_config_that_calls_for_more_than_there_is_says_what_is_missing(
    role: str, scheme: str | None, key: str, value: int, lacking: str, tmp_path: Path
) -> None:
    whole = write_glm4_moe(tmp_path / "plain", moe_intermediate_size=32, num_nextn_predict_layers=0)
    folder = tmp_path / "changed"
    if scheme:
        write_quantized(whole, folder, [(None, scheme)])
    else:
        self_draft(whole, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    draft = {"method": "draft_model", "model": str(folder)}
    (message,) = errors(folder, None) if role == "target" else errors(whole, draft)
    assert lacking in message and message.startswith("draft") == (role == "draft")


@pytest.mark.parametrize("module", ["mlp.experts.2.up_proj", "self_attn.q_proj", "mlp.shared_experts.down_proj"])
def test_a_quantised_weight_that_is_missing_is_named(module: str, folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "lost"
    write_quantized(folders.target, folder, [(None, "int4_g32")])
    tensors = load_file(folder / "model.safetensors")
    lost = {name for name in tensors if name.startswith(f"model.layers.1.{module}.")}
    save_file({name: tensor for name, tensor in tensors.items() if name not in lost}, folder / "model.safetensors")
    (message,) = errors(folder, None)
    assert "lacks" in message and f"model.layers.1.{module}.weight" in message


@pytest.mark.parametrize("proposer", [None, "ngram", *PART])
@pytest.mark.parametrize("scheme", [None, "int4_g32", "nvfp4"])
def test_what_can_be_served_is_not_refused(
    proposer: str | None, scheme: str | None, folders: Folders, tmp_path: Path
) -> None:
    target = folders.target
    if scheme:
        write_quantized(target, tmp_path / "target", [(None, scheme)])
        target = tmp_path / "target"
    keys = folders.drafts[proposer] if proposer else None
    assert errors(target, keys) == []


def test_without_files_there_is_nothing_to_find(folders: Folders, tmp_path: Path) -> None:
    bare = without_weights(folders.target, tmp_path / "bare")
    assert errors(bare, {"method": "mtp"}, load_format="dummy") == []
    (message,) = errors(bare, {"method": "mtp"})
    assert message.startswith(str(bare)) and "--load-format dummy needs none" in message


def test_the_embedded_gguf(folders: Folders) -> None:
    assert check_plan(Settings(model=None, speculative={"method": "ngram"})).errors == ()  # type: ignore[arg-type]


def test_a_gguf_drafts_with_its_own_ends() -> None:
    draft = {"method": "draft_model", "model": str(locate(None).path)}
    report = check_plan(Settings.model_validate({"model": None, "speculative": draft}))
    assert report.errors == ()
    # A row names the end that is the target's; this draft borrows none.
    assert not {"embedding", "head"} & {row.component for row in report.rows}
