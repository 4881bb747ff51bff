"""What must be true before any test module is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this once, when it is first imported, and parts of torch import it: its kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).parent
WHOLE = ("e2e", "ops", "spec", "gpu")
APART = ("clients", "deploy")
"""Rooms that have a mark, and tools, of their own."""
INTERPRETED = ("attention_triton", "kernels", "moe_triton", "packed_linear")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes long by its kind: whole engines and servers, and kernels in Triton's interpreter."""
    for item in items:
        room, *_, file = item.path.relative_to(ROOT).parts
        if room in WHOLE or any(name in file for name in INTERPRETED):
            item.add_marker("whole")
        if room in APART:
            item.add_marker(room)


@pytest.fixture(scope="session")
def cpu_kernels() -> None:
    """Skips where the C products cannot be compiled."""
    from server.engine.cpu.compiler import NoKernels
    from server.engine.cpu.library import load_library

    try:
        load_library()
    except NoKernels as reason:
        pytest.skip(str(reason))
