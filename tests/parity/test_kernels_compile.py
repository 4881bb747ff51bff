"""Kernels that the interpreter has checked also compile for sm_90, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from server.engine.kernels import angles, resident

INTS = {"idle": "i32", "width": "i32", "scale": "fp32", "seq_lens": "*i32", "real": "*i1", "inv": "*fp32"}

def check(kernel, constants, **types):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n) or INTS.get(n, "*i64") for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, {})
    compile(source, target=GPUTarget("cuda", 90, 32))

for count, padded in ((1, 1), (4, 4)):
    rows = {"COUNT": count, "COUNT_PADDED": padded}
    check(resident._gather, rows | {"BLOCK_SIZE": 32, "RATIO": 2, "TABLE": 256, "WHOLE": False})
    check(resident._places, rows | {"BLOCK_SIZE": 16})
    check(resident._verify, rows)
    check(resident._keep, rows, best="*bf16")
check(angles._angles, {"HALF": 64, "HALF_PADDED": 64}, cos="*bf16", sin="*bf16")
"""


def test_kernels_of_a_steps_rows_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
