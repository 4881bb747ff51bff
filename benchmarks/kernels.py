"""Times the Triton kernels beside cuBLAS and torch, on the shapes of Qwen3-8B and Qwen3-30B-A3B.

python benchmarks/kernels.py [--sections linears,attention,experts,stack] [--out FILE] [--sweep]

Every figure is the median of replays of a CUDA graph over all layers, whose weights are distinct and larger than the
cache; bandwidth counts the bytes that must be read, beside what a copy and a matrix-vector product reach here. Kernels
are compiled first, by several processes at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

CUDA = torch.device("cuda")
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Case:
    """Something to time. `make(layers)` builds it for so many layers and returns what one graph runs."""

    section: str
    name: str
    way: str
    layers: int
    scale: float
    """From the layers that are run to those of the model."""
    bytes: float
    """That all of the model's layers must read."""
    make: Callable[[int], Callable[[], object]]
    compiles: bool = True


def median_ms(work: Callable[[], object], replays: int = 7) -> float:
    """Of replays of one graph."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            work()
        graph.replay()
        times = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def profile(work: Callable[[], object]) -> str:
    """Where an eager run's time goes, by kernel: microseconds in all and launches."""
    work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        work()
        torch.cuda.synchronize()
    kernels = sorted(recorded.key_averages(), key=lambda kernel: -kernel.self_device_time_total)[:14]
    return "\n".join(f"    {k.self_device_time_total:9.0f} us {k.count:5d} x {k.key[:90]}" for k in kernels)


def noise(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=CUDA).normal_(0, scale)


_WEIGHTS: dict[tuple[int, ...], Tensor] = {}


def weights(layers: int, *shape: int) -> Tensor:
    """Kept between cases: only the last few shapes."""
    key = (layers, *shape)
    if key not in _WEIGHTS:
        if len(_WEIGHTS) > 1:
            _WEIGHTS.pop(next(iter(_WEIGHTS)))
        _WEIGHTS[key] = noise(layers, *shape, scale=0.02)
    return _WEIGHTS[key]


def linears(sweep: bool) -> Iterator[Case]:
    shapes = [
        ("8b qkv", 36, 6144, 4096),
        ("8b o", 36, 4096, 4096),
        ("8b gate_up", 36, 24576, 4096),
        ("8b down", 36, 4096, 12288),
        ("head", 1, 151936, 4096),
        ("30b qkv", 48, 5120, 2048),
        ("30b o", 48, 2048, 4096),
        ("30b router", 48, 128, 2048),
    ]
    for name, layers, outputs, inputs in shapes:
        yield from products(name, layers, outputs, inputs, sweep)


def products(name: str, layers: int, outputs: int, inputs: int, sweep: bool) -> Iterator[Case]:
    """One projection, for several numbers of rows."""
    from server.engine.kernels.linear import make_counters, tile_shape, vector_shape
    from server.engine.kernels.matvec import Shape, tiles, vectors

    copies = max(layers, 2)
    read = layers * outputs * inputs * 2

    def case(way: str, rows: int, product: Callable[[Tensor, Tensor], Tensor], compiles: bool = True) -> Case:
        def make(count: int) -> Callable[[], object]:
            x, stack = noise(rows, inputs), weights(count, outputs, inputs)
            return lambda: [product(x, stack[i]) for i in range(count)]

        return Case("linears", f"{name} x{rows}", way, copies, layers / copies, read, make, compiles)

    counters = make_counters(outputs, CUDA)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128):
        yield case("cublas", rows, lambda x, w: F.linear(x, w), False)
        if rows <= 4:
            chosen = {vector_shape(rows, outputs, inputs)}
            if sweep and rows == 1:
                chosen |= {Shape(4, 2048, 8), Shape(2, 2048, 4), Shape(4, 1024, 4)}
            for shape in sorted(chosen, key=str):
                label = f"vec n{shape.outputs} k{shape.inputs} w{shape.warps}"
                yield case(label, rows, lambda x, w, shape=shape: vectors(x, w, None, shape))
        if 1 < rows <= 64:
            chosen = {tile_shape(rows, outputs, inputs)}
            if sweep and rows in (8, 32) and outputs < 16384:
                chosen |= {Shape(32, 256, 4, 4, 1), Shape(32, 256, 4, 4, 2), Shape(64, 128, 4, 5, 1)}
                chosen |= {Shape(64, 128, 4, 5, 2), Shape(64, 256, 4, 4, 2), Shape(32, 128, 4, 6, 2)}
                chosen |= {Shape(128, 128, 8, 4, 4), Shape(32, 512, 4, 3, 1)}
            for shape in sorted(chosen, key=str):
                label = f"dot n{shape.outputs} k{shape.inputs} w{shape.warps} s{shape.stages} /{shape.shares}"
                yield case(label, rows, lambda x, w, shape=shape: tiles(x, w, None, shape, counters))


def attention_ways() -> dict[str, dict[str, int]]:
    """Changes of the backend's shapes."""
    ways: dict[str, dict[str, int]] = {"table": {}}
    for warps, keys, stages in ((4, 64, 3), (4, 64, 4), (2, 64, 3), (2, 32, 4), (4, 128, 4)):
        ways[f"w{warps} k{keys} s{stages}"] = {"warps": warps, "keys": keys, "stages": stages}
    return ways


def attention(sweep: bool) -> Iterator[Case]:
    from server.engine.attention.base import AttentionNeed, UniformStep
    from server.engine.attention.triton import TritonAttention

    ways = attention_ways() if sweep else {"table": {}}
    for model, layers, kv_heads in (("8b", 36, 8), ("30b", 48, 4)):
        for batch, query_len in ((1, 1), (8, 1), (32, 1), (128, 1), (1, 4), (8, 4), (32, 4)):
            for page in (64, 16):
                for way, changes in ways.items():
                    if way != "table" and (page == 16 or batch == 1 or (model == "30b" and query_len > 1)):
                        continue
                    context = 640

                    def make(count: int, batch: int = batch, query_len: int = query_len, page: int = page,
                             kv_heads: int = kv_heads, context: int = context,
                             changes: dict[str, int] = changes) -> Callable[[], object]:  # fmt: skip
                        backend = TritonAttention(AttentionNeed(CUDA, BF16, BF16, 32, kv_heads, 128), count)
                        backend._shapes = dataclasses.replace(backend._shapes, **changes)
                        pages = -(-context // page)
                        backend.allocate(batch * pages + 1, page)
                        assert backend.cache is not None
                        for tensor in (*backend.cache.keys, *backend.cache.values):
                            tensor.normal_()
                        tables = torch.randperm(batch * pages, device=CUDA).view(batch, pages)
                        tables = F.pad(tables, (0, 40960 // page - pages))
                        lengths = torch.full((batch,), context, dtype=torch.int32, device=CUDA)
                        at = context - query_len + torch.arange(query_len, device=CUDA)
                        slots = (tables[:, at // page] * page + at % page).flatten()
                        plan = backend.plan_uniform(UniformStep(query_len, 40960, lengths, tables, slots))
                        qkv = noise(batch * query_len, (32 + 2 * kv_heads) * 128)
                        norms = noise(2, 128)
                        cos, sin = noise(2, batch * query_len, 1, 128)
                        return lambda: [backend.forward_qkv(qkv, norms, 1e-6, cos, sin, i, plan) for i in range(count)]

                    read = layers * batch * context * kv_heads * 128 * 2 * 2
                    name = f"{model} b{batch} q{query_len} p{page}"
                    yield Case("attention", name, way, layers, 1, read, make)


def expert_bytes(tokens: int, per_weight: float = 2.0) -> float:
    hit = 128 * (1 - (1 - 8 / 128) ** tokens)
    return 48 * hit * 3 * 2048 * 768 * per_weight


def experts(sweep: bool) -> Iterator[Case]:
    from server.engine.kernels import experts as kernels
    from server.engine.kernels.experts import Cut, Packed
    from server.engine.moe.base import ExpertWeights, MoENeed
    from server.engine.moe.grouped_mm import GroupedMMMoE
    from server.engine.quantization.fp8 import Fp8
    from server.engine.quantization.int4 import Int4
    from server.engine.quantization.nvfp4 import Nvfp4

    cache: dict[tuple[str, int], list[Packed]] = {}

    def packed(kind: str, count: int) -> list[Packed]:
        if (kind, count) not in cache:
            cache.clear()
            cache[kind, count] = [pack(kind) for _ in range(count)]
        return cache[kind, count]

    def pack(kind: str) -> Packed:
        if kind == "bf16":
            return Packed(
                *kernels_stacks(ExpertWeights(noise(128, 1536, 2048, scale=0.02), noise(128, 2048, 768, scale=0.02)))
            )
        format = {"fp8": Fp8("block", "weight_scale_inv"), "nvfp4": Nvfp4("modelopt"), "int4": Int4(128)}[kind]
        return random_quantized(format)

    def inputs(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = torch.rand(tokens, 128, device=CUDA).argsort(-1)[:, :8].contiguous()
        return noise(tokens, 2048), ids, torch.rand(tokens, 8, device=CUDA).to(BF16)

    def case(
        kind: str, way: str, tokens: int, run: Callable[..., Tensor], per_weight: float, compiles: bool = True
    ) -> Case:
        def make(count: int) -> Callable[[], object]:
            layers = packed(kind, count)
            given = [inputs(tokens) for _ in range(count)]
            return lambda: [run(x, layer, ids, w) for layer, (x, ids, w) in zip(layers, given, strict=True)]

        name = f"{kind} t{tokens}"
        return Case("experts", name, way, 16, 3, expert_bytes(tokens, per_weight), make, compiles)

    def by_pairs(cuts: tuple[Cut, Cut] | None) -> Callable[..., Tensor]:
        return lambda x, layer, ids, w: kernels.by_pairs(x, layer, ids, w, cuts)

    def by_groups(cut: Cut | None) -> Callable[..., Tensor]:
        def run(x: Tensor, layer: Packed, ids: Tensor, w: Tensor) -> Tensor:
            return kernels.by_groups(x, layer, ids, w, (cut, cut) if cut else kernels.group_cuts(x, layer, ids))

        return run

    need = MoENeed(CUDA, BF16, 128, 8, 2048, 768)
    grouped = GroupedMMMoE(need)

    def torch_grouped(x: Tensor, layer: Packed, ids: Tensor, w: Tensor) -> Tensor:
        return grouped.forward(x, ExpertWeights(layer.gate_up.codes, layer.down.codes), ids, w)

    pair_cuts = {"table": None}
    group_cuts = {"table": None}
    if sweep:
        good = Cut(1, 8, 2048, 4, 1), Cut(1, 4, 1024, 4, 1)
        for up in (Cut(1, 8, 2048, 8, 1), Cut(1, 4, 2048, 4, 1), Cut(1, 16, 2048, 8, 1)):
            pair_cuts[f"up {up.outputs} {up.inputs} w{up.warps}"] = (up, good[1])
        for down in (Cut(1, 2, 1024, 4, 1), Cut(1, 8, 1024, 8, 1), Cut(1, 4, 256, 1, 1)):
            pair_cuts[f"down {down.outputs} {down.inputs} w{down.warps}"] = (good[0], down)
        for cut in (Cut(16, 64, 128, 4, 4), Cut(16, 128, 128, 8, 3), Cut(16, 64, 64, 4, 5)):
            group_cuts[label_of(cut)] = cut
    for tokens in (1, 2, 3, 4, 8):
        for label, cuts in pair_cuts.items():
            if label == "table" or tokens in (1, 2):
                yield case("bf16", f"pairs {label}", tokens, by_pairs(cuts), 2)
    many = (Cut(64, 128, 64, 4, 4, 4), Cut(128, 256, 64, 8, 3, 4), Cut(128, 256, 64, 8, 3, 1)) if sweep else ()
    for tokens in (2, 3, 4, 8, 16, 32, 64, 128, 512, 2048, 8192):
        yield case("bf16", "grouped_mm", tokens, torch_grouped, 2, False)
        for label, cut in group_cuts.items():
            if label == "table" or 4 <= tokens <= 128:
                yield case("bf16", f"groups {label}", tokens, by_groups(cut), 2)
        for cut in many:
            if tokens >= 512:
                yield case("bf16", f"groups {label_of(cut)}", tokens, by_groups(cut), 2)
    for kind, per_weight in (("fp8", 1.03125), ("nvfp4", 0.5625), ("int4", 0.515625)):
        for tokens in (1, 4, 8, 16, 32, 128):
            if tokens <= 16:
                yield case(kind, "pairs table", tokens, by_pairs(None), per_weight)
            if tokens >= 4:
                yield case(kind, "groups table", tokens, by_groups(None), per_weight)


def label_of(cut: object) -> str:
    """Its numbers."""
    return " ".join(str(number) for number in dataclasses.astuple(cut))  # type: ignore[call-overload]


def kernels_stacks(plain: object) -> object:
    from server.engine.kernels.expert_weights import stacks

    return stacks(plain, BF16)  # type: ignore[arg-type]


def random_quantized(format: object) -> object:
    """Random codes; scales near those of weights of 0.02."""
    from server.engine.kernels.expert_weights import stacks
    from server.engine.kernels.experts import Packed
    from server.engine.moe.base import QuantizedExperts
    from server.engine.quantization.stored import QuantizedTensors

    gate_up = QuantizedTensors.allocate(format, 768, 2048, CUDA, (128, 2))  # type: ignore[arg-type]
    down = QuantizedTensors.allocate(format, 2048, 768, CUDA, (128,))  # type: ignore[arg-type]
    for stored in (gate_up, down):
        for name, part in stored.parts.items():
            if name in ("weight", "weight_packed") and part.dtype != torch.float8_e4m3fn:
                part.view(torch.uint8).random_(0, 256)
            elif part.dtype == torch.float8_e4m3fn:
                part.copy_(torch.empty(part.shape, dtype=BF16, device=CUDA).uniform_(0.2, 1.0))
            elif part.dtype == torch.float32:
                part.fill_(0.01)
    return Packed(*stacks(QuantizedExperts(gate_up, down), BF16))


def stack(sweep: bool) -> Iterator[Case]:
    """Whole models without the sampler: embedding, layers, norm, head."""
    from server.bench.shapes import SHAPES
    from server.engine.attention.base import AttentionNeed, UniformStep
    from server.engine.attention.triton import TritonAttention
    from server.engine.attention.triton_plan import tile_shapes
    from server.engine.layers.context import BuildContext
    from server.engine.models.config import ModelConfig
    from server.engine.models.decoder import build_model
    from server.engine.parallel import ParallelGroup

    built: dict[tuple[str, int], tuple[object, TritonAttention]] = {}
    ways = attention_ways() if sweep else {"table": {}}
    if sweep:
        ways = {way: ways[way] for way in ("table", "w4 k64 s4", "w4 k128 s4")}

    def model(shape: str, count: int) -> tuple[object, TritonAttention]:
        if (shape, count) not in built:
            built.clear()
            _WEIGHTS.clear()
            torch.cuda.empty_cache()
            config = ModelConfig.from_hf({**SHAPES[shape], "num_hidden_layers": count})
            need = AttentionNeed(CUDA, BF16, BF16, config.num_heads, config.num_kv_heads, config.head_dim)
            backend = TritonAttention(need, count)
            made = build_model(config, BuildContext(BF16, CUDA, backend, "triton", ParallelGroup()))
            for name, parameter in made.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0, 0.02)
            made.finish_loading()
            backend.allocate(128 * 10 + 1, 64)
            built[shape, count] = made, backend
        return built[shape, count]

    for shape, layers in (("qwen3-8b", 36), ("qwen3-30b-a3b", 48)):
        for batch, query_len in ((1, 1), (8, 1), (32, 1), (128, 1), (1, 4), (8, 4), (32, 4)):
            for way, changes in ways.items():

                def make(
                    count: int,
                    shape: str = shape,
                    batch: int = batch,
                    query_len: int = query_len,
                    changes: dict[str, int] = changes,
                ) -> Callable[[], object]:
                    made, backend = model(shape, count)
                    backend._shapes = dataclasses.replace(tile_shapes(backend.need), **changes)
                    tables = torch.randperm(batch * 10, device=CUDA).view(batch, 10)
                    tables = F.pad(tables, (0, 630))
                    lengths = torch.full((batch,), 584, dtype=torch.int32, device=CUDA)
                    at = 584 - query_len + torch.arange(query_len, device=CUDA)
                    slots = (tables[:, at // 64] * 64 + at % 64).flatten()
                    plan = backend.plan_uniform(UniformStep(query_len, 40960, lengths, tables, slots))
                    ids = torch.randint(0, 151936, (batch * query_len,), device=CUDA)
                    positions = at.repeat(batch)
                    return lambda: made.logits(made(ids, positions, plan).final).argmax(-1)

                config = SHAPES[shape]
                kv = layers * config["num_key_value_heads"] * 128 * 4 * 584 * batch
                dense = {"qwen3-8b": 15.14e9, "qwen3-30b-a3b": 2.45e9}[shape]
                read = dense + kv + (expert_bytes(batch * query_len) if "30b" in shape else 0)
                yield Case("stack", f"{shape} b{batch} q{query_len}", way, layers, 1, read, make)


SECTIONS = {"linears": linears, "attention": attention, "experts": experts, "stack": stack}


def ceilings() -> tuple[float, float]:
    """TB/s of a copy, and of cuBLAS reading a large weight for one row."""
    source = noise(1 << 30)
    target = torch.empty_like(source)
    # By a kernel: a plain copy in a graph is the copy engine's, which is slower.
    copy = 2 * source.nbytes / median_ms(lambda: torch.neg(source, out=target)) / 1e9
    weight, x = noise(131072, 8192), noise(1, 8192)
    return copy, weight.numel() * 2 / median_ms(lambda: F.linear(x, weight)) / 1e9


def told(case: Case, error: Exception) -> str:
    return f"{case.section} {case.name} {case.way}: {type(error).__name__}: {str(error)[:300]}"


def compile_share(sections: list[str], sweep: bool, index: int, count: int) -> None:
    todo = (case for name in sections for case in SECTIONS[name](sweep) if case.compiles)
    for at, case in enumerate(todo):
        if at % count != index:
            continue
        try:
            case.make(1)()
            torch.cuda.synchronize()
        except Exception as error:
            print(
                f"compiling {case.section} {case.name} {case.way}: {type(error).__name__}: {str(error)[:300]}",
                flush=True,
            )
        _WEIGHTS.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--sweep", action="store_true", help="several configurations of each kernel")
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after so long")
    parser.add_argument("--profile", action="store_true", help="where the stacks' time goes, by kernel")
    parser.add_argument("--no-chain", action="store_true", help="without programmatic dependent launch")
    parser.add_argument("--compile-share", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sections = args.sections.split(",")
    torch.set_grad_enabled(False)
    if args.no_chain:
        from server.engine.kernels import runtime

        runtime.chained = lambda device: False
    if args.compile_share:
        compile_share(sections, args.sweep, *args.compile_share)
        return
    started = time.monotonic()
    command = [sys.executable, *sys.argv, "--compile-share"]
    shares = [subprocess.Popen([*command, str(i), str(args.processes)]) for i in range(args.processes)]
    for share in shares:
        share.wait()
    print(f"compiled in {time.monotonic() - started:.0f} s", flush=True)
    copy, matvec = ceilings()
    print(f"copy {copy:.2f} TB/s, cuBLAS matrix-vector {matvec:.2f} TB/s", flush=True)
    rows = []
    group = ""
    for name in sections:
        for case in SECTIONS[name](args.sweep):
            if time.monotonic() - started > args.seconds:
                print("out of time", flush=True)
                break
            try:
                work = case.make(case.layers)
                ms = median_ms(work) * case.scale
            except Exception as error:
                print(
                    f"FAILED {case.section} {case.name} {case.way}: {type(error).__name__}: {str(error)[:300]}",
                    flush=True,
                )
                if os.environ.get("TRACE"):
                    traceback.print_exc()
                continue
            row = {"section": name, "case": case.name, "way": case.way, "ms": ms, "tb_s": case.bytes / ms / 1e9}
            rows.append(row)
            if group != (name, case.name):
                group = (name, case.name)
                print(f"\n{name} {case.name}:", end="", flush=True)
            print(f"  [{case.way}] {ms:.3f} ms {row['tb_s']:.2f}", end="", flush=True)
            if name == "stack" and args.profile and case.way == "table":
                print(f"\n{profile(work)}", flush=True)
        print(f"\n-- {name} done after {time.monotonic() - started:.0f} s", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"copy_tb_s": copy, "matvec_tb_s": matvec, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
