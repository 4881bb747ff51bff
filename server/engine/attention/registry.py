"""The attention backends of this build, by name."""

from __future__ import annotations

from collections.abc import Mapping

from server.engine.attention.base import AttentionBackend, AttentionNeed, Unsupported
from server.engine.attention.flashinfer import FlashInferAttention
from server.engine.attention.torch import TorchAttention
from server.engine.attention.triton import TritonAttention
from server.engine.backends import Resolution, resolve

ATTENTION_BACKENDS: dict[str, type[AttentionBackend]] = {
    TorchAttention.name: TorchAttention,
    TritonAttention.name: TritonAttention,
    FlashInferAttention.name: FlashInferAttention,
}

PREFERENCE: Mapping[str, tuple[str, ...]] = {
    "cpu": ("torch", "triton", "flashinfer"),
    "cuda": ("triton", "flashinfer", "torch"),
}
"""All backends by device type, in the order that "auto" tries. On CUDA triton's comes first: its steps are captured."""

ALIASES = {"torch_sdpa": "torch", "triton_attn": "triton"}
"""vLLM's spellings, in lower case."""


def verdicts(need: AttentionNeed) -> dict[str, Unsupported | None]:
    """What every backend says of the need, in the order of preference on its device."""
    names = PREFERENCE.get(need.device.type, tuple(ATTENTION_BACKENDS))
    return {name: ATTENTION_BACKENDS[name].supports(need) for name in names}


def attention_backend(name: str) -> type[AttentionBackend]:
    """The class of a resolved name.

    Raises:
        KeyError: not a name of this build; requests go through `resolve_attention_backend` first.
    """
    return ATTENTION_BACKENDS[name]


def resolve_attention_backend(
    requested: str | None, need: AttentionNeed, setting: str = "--attention-backend"
) -> Resolution:
    """Resolve a request for one group of attention layers.

    Raises:
        UserError: it cannot be honoured; the message starts with `setting` and lists what would work.
    """
    return resolve(setting, requested, verdicts(need), ALIASES)
