"""Writes a head as a checkpoint folder that `outrider serve` loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from server.engine.loading.save import save_tensors
from tools.train_draft.unroll import Head


def export(head: Head, target: dict[str, Any], folder: Path) -> None:
    """Write model.safetensors (bf16) and config.json.

    Args:
        head: as trained.
        target: the target's config.json.
        folder: made if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in head.tensors().items()}
    save_tensors(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(head.config(target), indent=2) + "\n")
