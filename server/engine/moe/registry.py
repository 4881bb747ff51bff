"""The MoE backends of this build, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from server.engine.attention.base import Unsupported
from server.engine.backends import Resolution, resolve
from server.engine.moe.base import MoEBackend, MoENeed
from server.engine.moe.flashinfer_cutlass import FlashInferCutlassMoE
from server.engine.moe.grouped_mm import GroupedMMMoE
from server.engine.moe.torch import TorchMoE
from server.engine.moe.torch_int4 import TorchInt4MoE
from server.engine.moe.triton import TritonMoE
from server.engine.moe.triton_w4a16 import TritonW4A16MoE

_ALL: tuple[type[MoEBackend], ...] = (
    FlashInferCutlassMoE,
    GroupedMMMoE,
    TorchInt4MoE,
    TorchMoE,
    TritonMoE,
    TritonW4A16MoE,
)
MOE_BACKENDS: dict[str, type[MoEBackend]] = {cls.name: cls for cls in _ALL}

PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "cpu": ("grouped_mm", "torch_int4", "torch", "triton", "triton_w4a16", "flashinfer_cutlass"),
    "cuda": ("triton", "triton_w4a16", "grouped_mm", "flashinfer_cutlass", "torch", "torch_int4"),
}
"""All backends by device type, in the order that "auto" tries; on CUDA the quickest first, by BENCHMARKS.md."""


def verdicts(needs: Sequence[MoENeed]) -> dict[str, Unsupported | None]:
    """What every backend says of all the needs of one model, in the order of preference on their device."""
    names = PREFERENCE.get(needs[0].device.type, tuple(MOE_BACKENDS))
    return {
        name: next((problem for need in needs if (problem := MOE_BACKENDS[name].supports(need)) is not None), None)
        for name in names
    }


def moe_backend(name: str) -> type[MoEBackend]:
    """The class of a resolved name.

    Raises:
        KeyError: not a name of this build; requests go through `resolve_moe_backend` first.
    """
    return MOE_BACKENDS[name]


def resolve_moe_backend(requested: str | None, need: MoENeed, setting: str = "--moe-backend") -> Resolution:
    """Resolve a request for one model's experts.

    Raises:
        UserError: it cannot be honoured; the message starts with `setting` and lists what would work.
    """
    return resolve(setting, requested, verdicts([need]), {})
