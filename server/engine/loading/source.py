"""What the strict loader sees of a checkpoint, whatever its file format."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """One tensor of the checkpoint under its Hugging Face name; nothing is read before `copy_to`."""

    @property
    def name(self) -> str:
        """Hugging Face name, as in `CausalLM.weight_targets()`."""

    @property
    def file(self) -> Path:
        """The file it lies in."""

    @property
    def file_name(self) -> str:
        """Its name in that file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Row-major."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file, for the progress bar."""

    def check(self, target: Tensor) -> None:
        """Check that `copy_to` can bring what is stored into the target's dtype.

        Raises:
            UserError: it cannot.
        """

    def copy_to(self, target: Tensor) -> None:
        """Read it into `target` (same shape, any device, a dtype that `check` accepts)."""
