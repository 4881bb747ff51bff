"""Which models can be captured in CUDA graphs: those whose backends never wait for the device."""

from __future__ import annotations

import torch

from server.engine.attention.base import CapturableAttention
from server.engine.attention.registry import attention_backend
from server.engine.moe.registry import moe_backend


def capture_problem(device: torch.device, attention: str, moe: str | None) -> str | None:
    """Why a model with these backends cannot be captured, or None.

    Args:
        device: where it runs.
        attention: name of its attention backend.
        moe: name of its MoE backend, if it has experts.
    """
    if device.type != "cuda":
        return f"graphs need CUDA, and the device is {device.type}"
    if not issubclass(attention_backend(attention), CapturableAttention):
        return f"attention backend {attention} waits for the device"
    if moe is not None and not moe_backend(moe).capturable:
        return f"MoE backend {moe} waits for the device"
    return None
