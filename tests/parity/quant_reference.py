"""Quantised tensors to numbers, element by element as the formats are described, in fp64 and apart from the product."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(code: int) -> float:
    """Sign, 4 bits of exponent (bias 7), 3 bits of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


E4M3 = np.array([e4m3(code) for code in range(256)])
FP4 = np.array([(-1 if code & 8 else 1) * E2M1[code & 7] for code in range(16)])


def numbers(tensor: Tensor) -> np.ndarray:
    """fp64, whatever it is stored as."""
    if tensor.dtype is torch.float8_e4m3fn:
        return E4M3[tensor.view(torch.uint8).numpy()]
    return tensor.double().numpy()


def nibbles(words: np.ndarray, bits: int) -> np.ndarray:
    """[n, m] words of `bits` bits -> [n, m * bits / 4], the lowest first."""
    unsigned = words.astype(np.int64) & ((1 << bits) - 1)
    return np.stack([unsigned >> 4 * i & 15 for i in range(bits // 4)], -1).reshape(len(words), -1)


def reference(parts: dict[str, Tensor], rows: int, columns: int, group: int | None, block: tuple[int, int]) -> Tensor:
    """fp64 [rows, columns] of one module's tensors, by the last part of their names."""
    row, column = np.arange(rows)[:, None], np.arange(columns)[None]
    if "weight_shape" in parts:
        codes = nibbles(parts["weight_packed"].numpy(), 32)[:, :columns]
        places = (row, column // group if group else 0 * column)
        zero = np.full_like(codes, 8)
        if "weight_zero_point" in parts:
            zero = nibbles(parts["weight_zero_point"].numpy().T, 32)[:, :rows].T[places]
        return torch.from_numpy((codes - zero) * numbers(parts["weight_scale"])[places])
    if "weight_global_scale" in parts or "weight_scale_2" in parts:
        packed = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
        values = FP4[nibbles(packed.numpy(), 8)[:, :columns]] * numbers(parts["weight_scale"])[row, column // 16]
        if "weight_scale_2" in parts:
            return torch.from_numpy(values * float(parts["weight_scale_2"]))
        return torch.from_numpy(values / float(parts["weight_global_scale"]))
    scale = numbers(parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"])
    values = numbers(parts["weight"])
    if scale.size == 1:
        return torch.from_numpy(values * scale.item())
    if scale.size == rows:
        return torch.from_numpy(values * scale.reshape(rows, 1))
    grid = scale.reshape(-(-rows // block[0]), -(-columns // block[1]))
    return torch.from_numpy(values * grid[row // block[0], column // block[1]])
