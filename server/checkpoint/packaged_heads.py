"""The trained draft heads that lie inside this package; a name of `outrider/…` finds them like a hub id."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent.parent / "heads"

EMBEDDED_MODEL_HEAD = "outrider/SmolLM2-135M-Instruct-EAGLE3"
"""Drafts for the embedded default model."""
DEMO_MOE_HEAD = "outrider/SmolLM2-135M-MoE-MTP"
"""Drafts for the mixture of experts that `outrider demo moe` builds; it becomes a part of that checkpoint."""

PACKAGED_HEADS = (EMBEDDED_MODEL_HEAD, DEMO_MOE_HEAD)


def packaged_head(name: str) -> Path | None:
    """The folder of a head; None for another name, and where the package was installed without it."""
    if name not in PACKAGED_HEADS:
        return None
    folder = _FOLDER / name.partition("/")[2].lower()
    return folder if (folder / "model.safetensors").exists() else None
