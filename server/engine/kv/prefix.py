"""Names for the content of blocks: a chain of SHA-256 digests, so that equal names mean equal prefixes.

Not Python's `hash`: a collision would give one user another's context.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def root_hash(cache_salt: str) -> bytes:
    """The parent of a sequence's first block; different salts share nothing."""
    return hashlib.sha256(b"outrider:" + cache_salt.encode("utf-8", "surrogatepass")).digest()


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full block of token ids that follows `parent`."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()
