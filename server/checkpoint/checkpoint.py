"""What `locate` found: one checkpoint on this machine's disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Format = Literal["safetensors", "gguf", "config"]


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk, described but not read: no weight has been touched."""

    path: Path
    """The folder, or the `.gguf` file."""
    format: Format
    """How the weights are stored; "config" is a folder with `config.json` and no weights (load format dummy)."""
    config: Mapping[str, Any]
    """The keys of a Hugging Face `config.json`. For GGUF they are made from its metadata."""
    generation_config: Mapping[str, Any]
    """`generation_config.json`; empty if there is none."""
    source: str
    """What the user said, or where the embedded default came from."""
    path_hash: str
    """Label on /metrics in place of the path, which may be private."""
    ignore_patterns: tuple[str, ...] = ()
    """Shell patterns of weight files to leave aside."""


def hash_path(path: Path) -> str:
    """Return 12 hex digits of the SHA-256 of the resolved path."""
    return hashlib.sha256(str(path.resolve()).encode(errors="surrogateescape")).hexdigest()[:12]
