"""The C functions, typed: structures as `source/*.c` declare them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

from server.engine.cpu.compiler import NoKernels, compiled_library


class CWeight(Structure):
    """`Weight` in weights.h."""

    _fields_ = [("data", c_void_p), ("bias", c_void_p), ("bits", c_int64), ("rows", c_int64), ("columns", c_int64)]


class CLayer(Structure):
    """`Layer` in stack.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, CWeight) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("keys", "values")),
    ]


class CStack(Structure):
    """`Stack` in stack.h."""

    _fields_ = [
        ("layers", POINTER(CLayer)),
        *((name, c_void_p) for name in ("embedding", "embedding_norm", "final_norm", "inverse_frequency", "captured")),
        *((name, c_int64) for name in ("num_layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        *((name, c_int64) for name in ("rotary_dim", "page_size", "captures", "quantized", "plain", "begins_normed")),
        *((name, c_double) for name in ("eps", "angle_scale")),
    ]


class CStep(Structure):
    """`Step` in stack.h."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "sequences", "table_width")),
        *((name, c_void_p) for name in ("ids", "positions", "slots", "query_start", "tables")),
        *((name, c_void_p) for name in ("states", "hidden", "captured")),
    ]


class Library:
    """The loaded functions. They are called without the interpreter's lock."""

    def __init__(self, path: Path) -> None:
        functions = ctypes.CDLL(str(path))
        pointer, number = c_void_p, c_int64
        self.product_room = functions.outrider_product_room
        self.product_room.argtypes, self.product_room.restype = [number, number], number
        self.product = functions.outrider_product
        self.product.argtypes = [POINTER(CWeight), pointer, number, number, pointer, number, pointer, number]
        self.product.restype = None
        self.best = functions.outrider_best
        self.best.argtypes = [POINTER(CWeight), pointer, number, number, number, pointer, pointer, number]
        self.best.restype = None
        self.stack_room = functions.outrider_stack_room
        self.stack_room.argtypes, self.stack_room.restype = [POINTER(CStack), POINTER(CStep), number], number
        self.stack = functions.outrider_stack
        self.stack.argtypes, self.stack.restype = [POINTER(CStack), POINTER(CStep), pointer, number], None


@lru_cache(maxsize=1)
def load_library() -> Library:
    """The functions, compiled if need be.

    Raises:
        NoKernels: see `compiled_library`, or a library that cannot be loaded.
    """
    path = compiled_library()
    try:
        return Library(path)
    except OSError as error:
        raise NoKernels(f"{path} cannot be loaded: {error}") from None
