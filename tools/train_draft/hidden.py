"""Hidden states of the target over its own answers, in bf16: in memory, or in a folder that `capture` writes.

A folder has `tokens.bin` (int32, all sequences behind each other), `hidden.bin` (bf16 [tokens, (n + 1) * H]: the n
captured boundaries, then the final hidden state after the norm), and `sequences.jsonl` (start, length and the prompt's
length of each).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """One prompt with its answer, by its place in the folder's files."""

    start: int
    length: int
    prompt: int
    """Tokens of the prompt."""


@dataclass(frozen=True)
class HiddenStates:
    """All sequences behind each other."""

    sequences: list[Place]
    tokens: Tensor
    """int32 [tokens]."""
    hidden: Tensor
    """bf16 [tokens, (n + 1) * H]."""
    boundaries: tuple[int, ...]

    @classmethod
    def open(cls, folder: Path) -> HiddenStates:
        """Map a folder into memory."""
        about = json.loads((folder / "about.json").read_text())
        sequences = [Place(**json.loads(line)) for line in whole_lines(folder / "sequences.jsonl")]
        total = sequences[-1].start + sequences[-1].length
        tokens = torch.from_file(str(folder / "tokens.bin"), shared=True, size=total, dtype=torch.int32)
        size = total * about["width"]
        flat = torch.from_file(str(folder / "hidden.bin"), shared=True, size=size, dtype=torch.bfloat16)
        return cls(sequences, tokens, flat.view(total, about["width"]), tuple(about["boundaries"]))


def whole_lines(file: Path) -> list[str]:
    """The lines of a JSON Lines file, if there is one, but for a last one that was cut short."""
    return [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
