"""Strict loading from safetensors files: nothing missing, left over, misshapen, cut off or not finite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from server.checkpoint.checkpoint import Checkpoint
from server.engine.loading.load import load_weights, resolve_load_format
from server.errors import UserError


class Pair(nn.Module):
    """Two projections in one matrix, a norm, and a tensor that is left aside."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.full((12, 256), 7.0, dtype=dtype), requires_grad=False)
        self.norm = nn.Parameter(torch.full((256,), 7.0, dtype=torch.float32), requires_grad=False)
        self.finished = 0

    def weight_targets(self) -> dict[str, Tensor]:
        return {
            "model.q_proj.weight": self.fused[:8],
            "model.k_proj.weight": self.fused[8:],
            "model.norm.weight": self.norm,
        }

    def ignored_weight(self, name: str) -> bool:
        return name == "lm_head.weight"

    def finish_loading(self) -> None:
        self.finished += 1


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "model.q_proj.weight": torch.randn(8, 256),
        "model.k_proj.weight": torch.randn(4, 256),
        "model.norm.weight": torch.randn(256),
    }


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, "safetensors", {}, {}, str(folder), "hash")


def save(folder: Path, contents: dict[str, Tensor]) -> Checkpoint:
    save_file(contents, folder / "model.safetensors")
    return checkpoint(folder)


def load(found: Checkpoint, model: Pair | None = None, load_format: str = "auto") -> Pair:
    model = model or Pair()
    load_weights(model, found, load_format, 0, lambda done, total: None)
    return model


def test_every_target_is_filled(tmp_path: Path) -> None:
    contents = tensors()
    model = load(save(tmp_path, contents))
    assert torch.equal(model.fused, torch.cat((contents["model.q_proj.weight"], contents["model.k_proj.weight"])))
    assert torch.equal(model.norm, contents["model.norm.weight"])
    assert model.finished == 1


def test_loading_leaves_the_file_and_the_thread_count_alone(tmp_path: Path) -> None:
    found = save(tmp_path, tensors())
    before, threads = (tmp_path / "model.safetensors").read_bytes(), torch.get_num_threads()
    load(found).fused.fill_(3.0)
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    contents = {name: tensor.to(stored) for name, tensor in tensors().items()}
    model = load(save(tmp_path, contents), Pair(wanted))
    assert torch.equal(model.fused[:8], contents["model.q_proj.weight"].to(wanted))


def test_shards(tmp_path: Path) -> None:
    weight_map = {}
    for number, (name, tensor) in enumerate(tensors().items()):
        save_file({name: tensor}, tmp_path / f"model-{number}.safetensors")
        weight_map[name] = f"model-{number}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load(checkpoint(tmp_path)).norm, tensors()["model.norm.weight"])
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"shard model-1\.safetensors \(for tensor model\.k_proj\.weight\)"):
        load(checkpoint(tmp_path))


def test_numbers_that_lie_across_words(tmp_path: Path) -> None:
    """A header of odd length is legal and puts every tensor at an odd byte."""
    contents = tensors()
    save(tmp_path, contents)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    file.write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    assert torch.equal(load(checkpoint(tmp_path)).norm, contents["model.norm.weight"])


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda contents: contents.__delitem__(name)


def with_tensor(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda contents: contents.__setitem__(name, tensor)


def with_value(value: float, dtype: torch.dtype = torch.float32) -> Callable[[dict[str, Tensor]], None]:
    def change(contents: dict[str, Tensor]) -> None:
        contents["model.k_proj.weight"] = contents["model.k_proj.weight"].to(dtype)
        contents["model.k_proj.weight"][2, 3] = value

    return change


REFUSED = {
    "missing": (without("model.k_proj.weight"), r"lacks tensor model\.k_proj\.weight"),
    "left over": (with_tensor("model.q_proj.bias", torch.zeros(8)), r"holds tensor model\.q_proj\.bias, .* no place"),
    "wrong rows": (with_tensor("model.k_proj.weight", torch.zeros(5, 256)), r"k_proj\.weight has shape \[5, 256\]"),
    "transposed": (with_tensor("model.q_proj.weight", torch.zeros(256, 8)), r"makes model\.q_proj\.weight \[8, 256\]"),
    "one dim": (with_tensor("model.norm.weight", torch.zeros(256, 1)), r"norm\.weight has shape \[256, 1\]"),
    "nan": (with_value(float("nan")), r"tensor model\.k_proj\.weight holds 1 values that are NaN"),
    "infinite": (with_value(float("-inf"), torch.bfloat16), r"tensor model\.k_proj\.weight holds 1 values"),
    "quantised": (with_tensor("model.norm.weight", torch.zeros(256, dtype=torch.float8_e4m3fn)), "stored as F8_E4M3"),
    "integers": (with_tensor("model.norm.weight", torch.zeros(256, dtype=torch.int32)), "stored as I32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    change, message = REFUSED[name]
    contents = tensors()
    change(contents)
    model = Pair()
    threads = torch.get_num_threads()
    with pytest.raises(UserError, match=message) as caught:
        load(save(tmp_path, contents), model)
    assert str(tmp_path) in str(caught.value)
    assert model.finished == 0
    assert torch.get_num_threads() == threads


def test_nothing_is_read_before_all_names_fit(tmp_path: Path) -> None:
    contents = tensors() | {"surplus": torch.zeros(1)}
    model = Pair()
    with pytest.raises(UserError, match="surplus"):
        load(save(tmp_path, contents), model)
    assert bool((model.fused == 7.0).all())


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lacks 3 tensors \(model\.q_proj\.weight, model\.k_proj\.weight, "):
        load(save(tmp_path, {"lm_head.weight": torch.zeros(1)}))


def test_a_value_beyond_the_models_dtype(tmp_path: Path) -> None:
    contents = tensors()
    contents["model.q_proj.weight"][0, 0] = 1e6
    load(save(tmp_path, contents), Pair(torch.bfloat16))
    with pytest.raises(UserError, match="beyond the range of float16"):
        load(checkpoint(tmp_path), Pair(torch.float16))


def test_an_ignored_tensor_is_not_read(tmp_path: Path) -> None:
    load(save(tmp_path, tensors() | {"lm_head.weight": torch.full((3,), float("nan"))}))


def test_a_file_cut_by_one_kibibyte(tmp_path: Path) -> None:
    found = save(tmp_path, tensors())
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1024])
    with pytest.raises(UserError, match=r"model\.safetensors .*truncated: tensor model\."):
        load(found)


@pytest.mark.parametrize("body", ["model.language_model.", "language_model.model."])
def test_a_text_model_inside_a_multimodal_checkpoint(tmp_path: Path, body: str) -> None:
    contents = tensors()
    nested = {name.replace("model.", body, 1): tensor for name, tensor in contents.items()}
    nested |= {"model.visual.patch_embed.weight": torch.zeros(3), "lm_head.weight": torch.zeros(1)}
    assert torch.equal(load(save(tmp_path, nested)).norm, contents["model.norm.weight"])


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    found = save(tmp_path, tensors())
    load_weights(Pair(), found, "auto", 0, lambda done, total: calls.append((done, total)))
    total = 13 * 256 * 4
    assert calls[0] == (0, total)
    assert calls[-1] == (total, total)
    assert calls == sorted(calls)


def test_load_formats(tmp_path: Path) -> None:
    found = save(tmp_path, tensors())
    assert resolve_load_format(found, "auto") == resolve_load_format(found, "safetensors") == "safetensors"
    assert resolve_load_format(found, "dummy") == "dummy"
    with pytest.raises(UserError, match="holds safetensors weights, but the load format is gguf"):
        load(found, load_format="gguf")
    with pytest.raises(UserError, match="'bin' is not known; known are auto, safetensors, gguf, dummy"):
        load(found, load_format="bin")


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    found = Checkpoint(tmp_path, "config", {}, {}, "", "")
    for load_format in ("auto", "safetensors", "gguf"):
        with pytest.raises(UserError, match=r"no safetensors weights \(pytorch_model\.bin is a pickle"):
            load(found, load_format=load_format)


def dummy(seed: int, model: Pair | None = None) -> Pair:
    model = model or Pair()
    found = Checkpoint(Path("/nowhere"), "config", {}, {}, "", "")
    load_weights(model, found, "dummy", seed, lambda done, total: None)
    return model


def test_dummy_weights() -> None:
    model = dummy(0)
    assert bool((model.norm == 1).all())
    assert 0.018 < float(model.fused.std()) < 0.022
    assert model.finished == 1
    assert torch.equal(model.fused, dummy(0).fused)
    assert not torch.equal(model.fused, dummy(1).fused)


def test_dummy_weights_of_a_tensor_do_not_depend_on_the_others() -> None:
    class Smaller(Pair):
        def weight_targets(self) -> dict[str, Tensor]:
            return {"model.k_proj.weight": self.fused[8:]}

    assert torch.equal(dummy(5, Smaller()).fused[8:], dummy(5).fused[8:])
