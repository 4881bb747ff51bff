"""The MoE backends of this build, by name."""

from __future__ import annotations

from server.engine.backends import Resolution, resolve
from server.engine.moe.base import MoEBackend, MoENeed
from server.engine.moe.grouped_mm import GroupedMMMoE
from server.engine.moe.torch import TorchMoE
from server.engine.moe.torch_int4 import TorchInt4MoE

MOE_BACKENDS: dict[str, type[MoEBackend]] = {cls.name: cls for cls in (GroupedMMMoE, TorchInt4MoE, TorchMoE)}
"""In order of preference for "auto"."""


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
    return resolve(setting, requested, {name: cls.supports(need) for name, cls in MOE_BACKENDS.items()}, {})
