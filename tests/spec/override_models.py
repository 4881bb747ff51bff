"""Targets and drafts of the override tests: all have experts, so that every key means something to every method."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from server.engine.layers.attention import Attention
from server.engine.layers.linear import Linear
from server.engine.layers.moe import Experts
from server.engine.runner import ModelRunner
from tests.spec.engine_harness import Harness
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import mtp_alone, write_glm4_moe

NEURAL = ("draft_model", "eagle3", "mtp", "mtp_own")
"""Proposers with a draft model; mtp_own is the method mtp with a folder of its own."""
PROMPT = [1, 2, 3, 4, 5] * 4


@dataclass(frozen=True)
class Folders:
    """One target, and what each proposer drafts with."""

    target: Path
    drafts: dict[str, dict[str, Any]]
    """By proposer: the least that speculative_config needs."""


def write_folders(folder: Path) -> Folders:
    """A GLM-4.5 with an MTP layer, itself as a whole draft, its layer as a folder, and an EAGLE-3 head with experts."""
    target = write_glm4_moe(folder / "glm", moe_intermediate_size=32)
    alone = mtp_alone(target, folder / "alone")
    head = write_eagle3(target, folder / "eagle3", boundaries=(0, 1, 2), sparse=True, moe_intermediate_size=32)
    return Folders(
        target,
        {
            "ngram": {"method": "ngram"},
            "draft_model": {"method": "draft_model", "model": str(target)},
            "eagle3": {"method": "eagle3", "model": str(head)},
            "mtp": {"method": "mtp"},
            "mtp_own": {"method": "mtp", "model": str(alone)},
        },
    )


def without_weights(source: Path, folder: Path) -> Path:
    """The folder's config and tokenizer alone."""
    return shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))


def draft_runner(engine: Harness) -> ModelRunner[Any]:
    assert engine.built.draft is not None and engine.built.draft.runner is not None
    return engine.built.draft.runner


def held(runner: ModelRunner[Any]) -> dict[str, str]:
    """What the modules of a built model hold, not what a plan or a row says of them."""
    model: nn.Module = runner.model
    attention = modules(model, Attention)
    found = {
        "attention": {module.backend.name for module in attention},
        "moe": {module.backend.name for module in modules(model, Experts)},
        "kv_cache_dtype": {str(part.dtype) for module in attention for part in cache_tensors(module)},
        "quantization": {module.weight_format.label for module in modules(model, (Linear, Experts))},
    }
    return {name: "+".join(sorted(value.removeprefix("torch.") for value in values)) for name, values in found.items()}


def cache_tensors(module: Attention) -> Iterable[Any]:
    """The key and value memory that the module's backend has allocated."""
    cache = module.backend.cache  # type: ignore[attr-defined]
    assert cache is not None
    return [cache.keys[module.layer_id], cache.values[module.layer_id]]


def modules(model: nn.Module, kind: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def told(engine: Harness, role: str) -> dict[str, tuple[str, str, str]]:
    """By component: what the rows that users see say was requested, what it resolved to, and who decided."""
    return {row.component: (row.requested, row.resolved, row.source) for row in engine.built.rows if row.role == role}
