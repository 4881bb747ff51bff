"""Kernels over fp8 and 4-bit memory compile for sm_90 as well, bf16 operands and all, which needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys
import triton.language as tl
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from server.engine.attention import triton_decode, triton_kernels
from server.engine.kernels import packed_linear, rotate

def check(kernel, constants, types):
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, {(names.index(n),): value for n, value in constants.items()}, {})
    compile(source, target=GPUTarget("cuda", 90, 32))

KINDS = {
    "fp8": dict(KIND="fp8", GROUP=0, BLOCK_ROWS=0, HALF_BLOCKS=0, SHIFTED=False, COARSE=4096),
    "fp8_block": dict(KIND="fp8_block", GROUP=128, BLOCK_ROWS=128, HALF_BLOCKS=32, SHIFTED=False, COARSE=0),
    "int4": dict(KIND="int4", GROUP=128, BLOCK_ROWS=0, HALF_BLOCKS=0, SHIFTED=True, COARSE=0),
    "fp4": dict(KIND="fp4", GROUP=16, BLOCK_ROWS=0, HALF_BLOCKS=0, SHIFTED=False, COARSE=4096),
}

def linear(kind):
    floats = "*bf16"
    codes = "*fp8e4nv" if kind.startswith("fp8") else "*u8"
    fine = {"fp8_block": "*fp32", "int4": floats, "fp4": "*fp8e4nv"}.get(kind, codes)
    types = dict(x=floats, codes=codes, fine=fine, shifts=floats if kind == "int4" else codes, coarse="*fp32",
                 bias=floats, out=floats)
    constants = dict(KINDS[kind], IN=4096, OUT=4096, BIAS=False, CHAINED=True)
    check(packed_linear._vectors, constants | dict(BLOCK_N=4, BLOCK_K=2048), types)
    check(packed_linear._tiles, constants | dict(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, COMPUTE=tl.bfloat16), types)

def cache():
    kv, floats = "*fp8e4nv", "*bf16"
    heads = dict(HEAD_DIM=128, DIM_PADDED=128)
    check(triton_kernels.store_kv, heads | dict(NUM_KV_HEADS=8, HEADS_PADDED=8),
          dict(k=floats, v=floats, key_cache=kv, value_cache=kv, slots="*i64"))
    check(triton_kernels.attend,
          heads | dict(GROUP=4, PAGE_SIZE=64, BLOCK_M=64, BLOCK_N=64, COMPUTE=tl.bfloat16, LONGEST=0),
          dict(q=floats, keys=kv, values=kv, out=floats, tiles="*i32", block_tables="*i64", scale="fp32"))
    check(triton_decode.attend_part,
          heads | dict(UNIFORM=True, SPLIT=True, GROUP=4, PAGE_SIZE=64, BLOCK_M=16, BLOCK_N=64, LINE=128, LINES=1,
                       FETCHED=512, COMPUTE=tl.bfloat16, LONGEST_PART=0, CHAINED=True),
          dict(q=floats, keys=kv, values=kv, out="*fp32", sums="*fp32", rows="*i32", lengths="*i32",
               block_tables="*i64", scale="fp32"))
    check(rotate._rotate,
          heads | dict(HEADS=32, KV_HEADS=8, ROTARY_DIM=128, NORM=True, CACHED=True, PER_PROGRAM=4, CHAINED=True),
          dict(qkv=floats, out=floats, key_cache=kv, value_cache=kv, head_norms=floats, cos=floats, sin=floats,
               slots="*i64", eps="fp32"))

cache() if sys.argv[1] == "cache" else linear(sys.argv[1])
"""


@pytest.mark.parametrize("what", ["fp8", "fp8_block", "int4", "fp4", "cache"])
def test_compiles(what: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", CODE, what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
