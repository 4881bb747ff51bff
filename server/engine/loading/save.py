"""Tensors into a safetensors file."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write contiguous tensors as other programs write checkpoints.

    Args:
        tensors: by name.
        path: the file to make or to replace. A new one has the mode that the umask gives to any new file.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dict(tensors), path, metadata={"format": "pt"})
    # The library renames a temporary file, which only its owner may read.
    path.chmod(mode)
