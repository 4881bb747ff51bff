"""Byte sizes as people write them: 2GiB, 512MiB, 1.5GB, 1048576."""

from __future__ import annotations

import re

_FACTORS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", re.ASCII)


def parse_size(value: object) -> int:
    """Bytes in `value`: a whole number of bytes, or a text such as 2GiB (powers of 1024) or 1.5GB (powers of 1000).

    A bare K, M, G or T is a power of 1024, as in Kubernetes and Docker limits' usual reading.

    Raises:
        ValueError: not a size, an unknown unit, or not at least one byte.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise ValueError("must be a size: a number with a unit, such as 2GiB, 512MiB or 1.5GB")
        number, unit = match.groups()
        if unit.lower() not in _FACTORS:
            raise ValueError(f"must have a unit among KiB, MiB, GiB, TiB (1024) or KB, MB, GB, TB (1000), not {unit!r}")
        size = int(float(number) * _FACTORS[unit.lower()]) if "." in number else int(number) * _FACTORS[unit.lower()]
    else:
        raise ValueError("must be a size: a number with a unit, such as 2GiB, 512MiB or 1.5GB")
    if size < 1:
        raise ValueError("must be at least one byte")
    return size


def format_size(size: int) -> str:
    """The shortest text that `parse_size` reads back as exactly `size` bytes."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B"
