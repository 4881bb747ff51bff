"""A weight file in memory, page by page as it is touched."""

from __future__ import annotations

import mmap
from pathlib import Path
from threading import Lock

import torch

from server.checkpoint.tensor_header import TensorHeader
from server.errors import UserError

LARGEST_NUMBER = 8
"""Bytes."""


class MappedFiles:
    """Maps each file once, for any thread; a map lives as long as a tensor made from it does."""

    def __init__(self) -> None:
        self._maps: dict[Path, torch.Tensor] = {}
        self._lock = Lock()

    def bytes_of(self, header: TensorHeader) -> torch.Tensor:
        """Return the tensor's bytes in the file: uint8 [nbytes], not to be written to; a copy only if misaligned.

        Raises:
            UserError: the file cannot be mapped, or has shrunk since its header was read.
        """
        with self._lock:
            file = self._maps.get(header.file)
            if file is None:
                file = self._maps[header.file] = _map(header.file)
        if header.offset + header.nbytes > file.numel():
            raise UserError(f"{header.file} changed while it was read: tensor {header.name} is no longer whole")
        data = file[header.offset : header.offset + header.nbytes]
        # Neither format promises that numbers lie at multiples of their size, which torch needs to view them.
        return data.clone() if header.offset % LARGEST_NUMBER else data


def _map(path: Path) -> torch.Tensor:
    try:
        with path.open("rb") as file:
            # A private map: torch wants writable memory, and nothing that is written could reach the file.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot map {path}: {error}") from error
    return torch.frombuffer(data, dtype=torch.uint8)
