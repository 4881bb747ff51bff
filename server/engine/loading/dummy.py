"""Random weights, for measuring and testing without files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from server.engine.loading.progress import ByteProgress

STANDARD_DEVIATION = 0.02
"""As models are initialised before training: activations neither vanish nor explode."""


def fill_with_random(targets: Mapping[str, Tensor], seed: int, progress: Callable[[int, int], None]) -> None:
    """Fill each target on its own device: norm weights with 1, all else with normal numbers.

    A tensor's values depend on the seed, its name, shape, dtype and kind of device, not on the other tensors.
    """
    counter = ByteProgress(sum(target.nbytes for target in targets.values()), progress)
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator(target.device).manual_seed(int.from_bytes(digest[:7], "little"))
            target.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        counter.add(target.nbytes)
