"""Small host arrays to the device of the logits."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`. A CUDA copy goes through pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
