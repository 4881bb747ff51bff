"""The tensor names of EAGLE-3 heads: producers differ, the parts are the same."""

from __future__ import annotations

import re
from collections.abc import Iterable

from server.errors import UserError

_LATER_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.(.+)")


def canonical_name(name: str) -> str:
    """The name that the modules use: no `model.` in front (NeMo), `layers.0.` for `midlayer.` (EAGLE, SpecForge)."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    # A later layer has one input, and so one norm, whatever it is called.
    return _LATER_NORM.sub(r"layers.\1.input_layernorm.\2", name)


def file_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> the name in the file.

    Raises:
        UserError: two tensors mean the same part.
    """
    found: dict[str, str] = {}
    for name in names:
        part = canonical_name(name)
        if part in found:
            raise UserError(f"the EAGLE-3 checkpoint holds {found[part]} and {name}, which mean the same tensor")
        found[part] = name
    return found
