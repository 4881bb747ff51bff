"""What must be true before any test module is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton reads this once, when it is first imported, and parts of torch import it: its kernels then run on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")
