"""Random numbers without state: each is a function of (seed, output position, purpose) and of nothing else.

The generator is Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011): the key is the request's seed, the counter holds position and purpose. A seeded answer is therefore the
same alone, in any batch, after a preemption and in any process.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_KEY_STEPS = (
    np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64) * np.arange(_ROUNDS, dtype=np.uint64)[:, None, None]
)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


class Purpose(IntEnum):
    """What a number decides; numbers of different purposes at one position are independent."""

    SAMPLE = 0
    ACCEPT = 1
    RESAMPLE = 2
    DRAFT = 3


def philox4x32(counter: npt.NDArray[np.uint64], key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The Philox4x32-10 bijection.

    Args:
        counter: [4, N], each a 32-bit word.
        key: [2, N], each a 32-bit word.

    Returns:
        [4, N], each a 32-bit word.
    """
    multiplied, mixed = counter[::2], counter[1::2]
    for round_key in (key + _KEY_STEPS) & _LOW:
        product = multiplied * _MULTIPLIERS
        multiplied = (product >> _HALF)[::-1] ^ mixed ^ round_key
        mixed = (product & _LOW)[::-1]
    return np.stack([multiplied[0], mixed[0], multiplied[1], mixed[1]])


def uniforms(seeds: Sequence[int], positions: Sequence[int], purpose: Purpose) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1), multiples of 2**-53.

    Args:
        seeds: [R], the requests' seeds, int64 (any other integer counts modulo 2**64).
        positions: [R], tokens that the request has generated before, at least 0.
        purpose: what the numbers decide.

    Returns:
        [R], row i a function of `seeds[i]`, `positions[i]` and `purpose` alone.
    """
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    key = np.stack([seed & _LOW, seed >> _HALF])
    counter = np.stack([position & _LOW, position >> _HALF, np.full_like(seed, purpose), np.zeros_like(seed)])
    words = philox4x32(counter, key)
    mantissa = ((words[0] << _HALF) | words[1]) >> np.uint64(11)
    values: npt.NDArray[np.float64] = mantissa.astype(np.float64) * 2.0**-53
    return values
