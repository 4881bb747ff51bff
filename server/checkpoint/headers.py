"""All tensors of a checkpoint, from the headers of its weight files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.gguf_header import read_gguf_header
from server.checkpoint.json_files import MIB, read_json_object
from server.checkpoint.safetensors_header import read_safetensors_header
from server.checkpoint.tensor_header import TensorHeader
from server.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
INDEX_LIMIT = 64 * MIB


def read_headers(checkpoint: Checkpoint) -> Mapping[str, TensorHeader]:
    """Return every tensor of the checkpoint's weight files by its name in the file; {} without weights.

    Raises:
        UserError: naming the file, and the tensor where one is concerned, that is missing, truncated or malformed.
    """
    if checkpoint.format == "gguf":
        return read_gguf_header(checkpoint.path).tensors
    if checkpoint.format == "safetensors":
        return _read_folder(checkpoint.path, checkpoint.ignore_patterns)
    return {}


def weight_files(folder: Path, ignore_patterns: Sequence[str] = ()) -> list[Path]:
    """Safetensors files that may belong to the model: a second copy in Mistral's own format is left out."""
    ignored = ("consolidated*", *ignore_patterns)
    return sorted(
        path for path in folder.glob("*.safetensors") if not any(fnmatch(path.name, pattern) for pattern in ignored)
    )


def _read_folder(folder: Path, ignore_patterns: Sequence[str]) -> dict[str, TensorHeader]:
    files = weight_files(folder, ignore_patterns)
    extra = [path for path in files if "mtp" in path.name.lower()]
    if (folder / INDEX).exists():
        headers = {name: header for name, header in _read_shards(folder).items() if header.file in files}
    else:
        main = [folder / SINGLE] if folder / SINGLE in files else [path for path in files if path not in extra]
        if len(main) != 1:
            names = ", ".join(path.name for path in main) or "none"
            raise UserError(
                f"{folder} has neither {INDEX} nor {SINGLE}, nor exactly one other safetensors file (found: {names})"
            )
        headers = read_safetensors_header(main[0])
    used = {header.file for header in headers.values()}
    # Some tools put the multi-token-prediction layer beside the model without listing it in the index.
    for path in extra:
        if path not in used:
            headers = read_safetensors_header(path) | headers
    return headers


def _read_shards(folder: Path) -> dict[str, TensorHeader]:
    index = folder / INDEX
    weight_map = read_json_object(index, INDEX_LIMIT).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} has no weight_map")
    shards: dict[str, dict[str, TensorHeader]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise UserError(f"{index} maps tensor {name} to {file!r}, which is not the name of a file beside it")
        if file not in shards:
            if not (folder / file).exists():
                raise UserError(f"{index} names the shard {file} (for tensor {name}), which is missing")
            shards[file] = read_safetensors_header(folder / file)
        if name not in shards[file]:
            raise UserError(f"{folder / file} lacks tensor {name}, which {index} places there")
    unlisted = {name: header for shard in shards.values() for name, header in shard.items()}
    return unlisted | {name: shards[file][name] for name, file in weight_map.items()}
