"""Tiny quantised checkpoints, loaded as the server loads them, and their models with dequantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hf_oracle import oracle
from paged_steps import Paged, build
from quant_reference import reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.locate import locate
from server.engine.loading.load import load_weights
from server.engine.models.config import ModelConfig
from server.engine.models.linear_names import target_modules
from server.engine.quantization.formats import Formats
from server.engine.quantization.resolve import resolve_formats
from server.engine.quantization.schemes import Layout
from server.engine.quantization.write import write_quantized

PARTS = ("weight_packed", "weight_scale", "weight_scale_inv", "weight_shape", "weight_zero_point") + (
    "weight_global_scale",
    "weight_scale_2",
)


@dataclass
class Quantized:
    """One checkpoint, quantised by the writer."""

    hf: PreTrainedModel
    """The plain model."""
    plain: dict[str, Tensor]
    folder: Path
    labels: dict[str, str]
    """What the writer did."""

    @property
    def checkpoint(self) -> Checkpoint:
        return locate(str(self.folder))

    def config(self) -> ModelConfig:
        return ModelConfig.from_hf(self.checkpoint.config)

    def formats(self) -> Formats:
        return resolve_formats(self.checkpoint, self.config())

    def load(self, dtype: torch.dtype = torch.float32, moe: str = "torch") -> Paged:
        paged = build(self.config(), dtype=dtype, moe=moe, formats=self.formats())
        load_weights(paged.model, self.checkpoint, "auto", 0, lambda done, total: None)
        return paged

    def load_dummy(self) -> Paged:
        paged = build(self.config(), formats=self.formats())
        load_weights(paged.model, self.checkpoint, "dummy", 7, lambda done, total: None)
        return paged

    def target_labels(self) -> set[str]:
        return self.formats().labels(target_modules(self.config()))

    def dequantized(self, group: int | None, block: tuple[int, int] = (128, 128)) -> dict[str, Tensor]:
        """The plain tensors, with those that are quantised in their place, by the written-out formulas."""
        tensors = dict(self.plain)
        modules: dict[str, dict[str, Tensor]] = {}
        for file in self.folder.glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                module, _, last = name.rpartition(".")
                modules.setdefault(module, {})[last] = tensor
        for module, parts in modules.items():
            if len(parts.keys() - {"bias"}) > 1 and parts.keys() & set(PARTS):
                rows, columns = tensors[f"{module}.weight"].shape
                tensors[f"{module}.weight"] = reference(parts, rows, columns, group, block).float()
        return tensors

    def dequantized_hf(self, group: int | None) -> PreTrainedModel:
        """Transformers' model with those weights."""
        tensors = self.dequantized(group)
        return load_into(self.hf, tensors, self.folder.parent / "dequantized")


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """As transformers does."""
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})


def load_into(hf: PreTrainedModel, tensors: dict[str, Tensor], folder: Path) -> PreTrainedModel:
    """A copy of a model with other weights, through a file, since transformers names them differently in memory."""
    folder.mkdir(exist_ok=True)
    hf.config.save_pretrained(folder)
    save(tensors, folder)
    loaded: PreTrainedModel = type(hf).from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    return loaded


def quantized(
    config: PreTrainedConfig,
    folder: Path,
    schemes: Sequence[tuple[str | None, str]] | str,
    *,
    layout: Layout = "compressed-tensors",
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Quantized:
    """A random model of transformers, quantised. `extra` tensors are added to the plain checkpoint."""
    plain = folder / "plain"
    hf, _, tensors = oracle(config, plain)
    tensors |= extra or {}
    save(tensors, plain)
    pairs = [(None, schemes)] if isinstance(schemes, str) else schemes
    labels = write_quantized(plain, folder / "quantized", pairs, layout=layout, **options)
    return Quantized(hf, tensors, folder / "quantized", labels)
