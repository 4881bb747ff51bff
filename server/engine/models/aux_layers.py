"""Which hidden states of the target an EAGLE-3 head reads.

Boundary i is the residual stream at the input of layer i, N what the last layer leaves. Config files write either
boundaries (vLLM, speculators) or the layers whose output is meant (SpecForge, modelopt, AngelSlim), one less each, and
do not say which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.errors import UserError

OVERRIDE = "speculative_config.aux_hidden_state_layers"
KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class AuxLayers:
    """The choice, for `build_model(capture=…)`."""

    boundaries: tuple[int, ...]
    """Rising: hidden states are concatenated in the order of the layers, however a list is ordered."""
    why: str
    """The rule that was taken, for the user."""


def aux_layers(config: Mapping[str, Any], num_target_layers: int, override: Sequence[int] | None = None) -> AuxLayers:
    """Choose by the override, the head's config, or the default, in this order.

    Args:
        config: the head's.
        num_target_layers: N.
        override: boundaries that the user names.

    Raises:
        UserError: boundaries out of range or there twice, or a default that this target is too shallow for.
    """
    if override is not None:
        return _checked(override, num_target_layers, OVERRIDE, "boundaries, as asked for")
    listed = _listed(config)
    if listed is None:
        return _default(num_target_layers)
    if min(listed) == 1 and max(listed) < num_target_layers:
        # The default of the producers that list outputs is [1, …], of those that list boundaries [2, …].
        boundaries = [index + 1 for index in listed]
        return _checked(boundaries, num_target_layers, KEY, f"layer outputs {listed}, since the list starts with 1")
    return _checked(listed, num_target_layers, KEY, f"boundaries {listed} as listed by the head's config")


def _listed(config: Mapping[str, Any]) -> list[int] | None:
    inner = config.get("eagle_config")
    places = [inner] if isinstance(inner, Mapping) else []
    for place in (*places, config):
        ids = place.get(KEY)
        if ids is None or ids == []:
            continue
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise UserError(f"the draft's config.json: {KEY} is {ids!r}; it must be a list of layer numbers")
        return ids
    return None


def _default(num_layers: int) -> AuxLayers:
    boundaries = (2, num_layers // 2, num_layers - 3)
    if sorted(set(boundaries)) != list(boundaries):
        raise UserError(
            f"the EAGLE-3 head lists no layers, and the usual ones, 2, N/2 and N-3, do not exist in a target of "
            f"{num_layers} layers; name them with {OVERRIDE}"
        )
    return AuxLayers(boundaries, f"boundaries 2, N/2, N-3 of N = {num_layers}, since the head's config lists none")


def _checked(boundaries: Sequence[int], num_layers: int, where: str, why: str) -> AuxLayers:
    rising = tuple(sorted(boundaries))
    if not rising or rising[0] < 0 or rising[-1] > num_layers or len(set(rising)) != len(rising):
        raise UserError(
            f"{where}: boundaries {list(boundaries)} are not distinct numbers from 0 to {num_layers}, the target's "
            f"layers; name the right ones with {OVERRIDE}"
        )
    return AuxLayers(rising, why)
