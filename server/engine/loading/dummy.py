"""Random weights, for measuring and testing without files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from server.engine.loading.progress import ByteProgress

STANDARD_DEVIATION = 0.02
"""As models are initialised before training: activations neither vanish nor explode."""
SCALE = 2.0**-7
"""Of quantised weights. Uniform 4-bit codes then stand for numbers of about the same deviation."""


def fill_with_random(targets: Mapping[str, Tensor], seed: int, progress: Callable[[int, int], None]) -> None:
    """Fill each target on its own device: norm weights with 1, other weights with normal numbers.

    Of quantised ones, codes are random and scales constant. A tensor's values depend on the seed, its name, shape,
    dtype and kind of device, not on the other tensors.
    """
    counter = ByteProgress(sum(target.nbytes for target in targets.values()), progress)
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
        else:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator(target.device).manual_seed(int.from_bytes(digest[:7], "little"))
            _draw(target, name.rpartition(".")[2], generator)
        counter.add(target.nbytes)


def _draw(target: Tensor, kind: str, generator: torch.Generator) -> None:
    if kind in ("weight_global_scale", "weight_scale_2"):
        target.fill_(1.0)
    elif kind in ("weight_scale", "weight_scale_inv"):
        target.copy_(torch.tensor(SCALE))
    elif kind == "weight_shape":
        return  # holds the one right value since it was made
    elif target.dtype is torch.int32:
        target.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    elif target.dtype is torch.uint8:
        target.random_(0, 256, generator=generator)
    elif target.dtype is torch.float8_e4m3fn:
        numbers = torch.empty(target.shape, device=target.device)
        target.copy_(numbers.normal_(0.0, STANDARD_DEVIATION / SCALE, generator=generator))
    else:
        target.normal_(0.0, STANDARD_DEVIATION, generator=generator)
