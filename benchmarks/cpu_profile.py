"""Where a decode step of the embedded model goes on a CPU, against its linear layers alone.

python benchmarks/cpu_profile.py [--sequences 1,4,8,32] [--context 64,4000] [-- flags such as --cpu-weights packed]

Milliseconds a step, medians: all of the engine's round; the call for all layers; the call for the head with its choice
of tokens; the products of those weights alone, one after the other; and what reading the weights and the cached keys
and values takes at the bandwidth of a large copy in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from server.engine.cpu.library import load_library
from server.engine.cpu.weights import PackedWeight
from server.engine.floor import measure_bandwidth
from server.engine.in_process import InProcessEngine
from server.engine.layers.linear import Linear
from server.flags import parse_check

STEPS = 40


def main() -> None:
    own = sys.argv[1:]
    flags = own[own.index("--") + 1 :] if "--" in own else []
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", default="1,4,8,32")
    parser.add_argument("--context", default="64")
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    engine = InProcessEngine(parse_check(flags).settings)
    times: dict[str, list[float]] = {}
    library = load_library()
    for name, owner, attribute in (
        ("round", engine.core, "round"),
        ("layers", library, "stack"),
        ("head", library, "best"),
    ):
        setattr(owner, attribute, timed(getattr(owner, attribute), times.setdefault(name, [])))
    linears = [module.coded for module in engine.built.target.model.modules() if isinstance(module, Linear)]
    weights = [weight for weight in linears if weight is not None]
    if not weights:
        raise SystemExit("no weight is packed here: see `outrider check`")
    bandwidth = measure_bandwidth(torch.device("cpu"))
    weight_bytes = sum(weight.data.nbytes for weight in weights)
    token_bytes = engine.built.target.block_bytes / engine.plan.block_size
    print(f"{torch.get_num_threads()} threads; ms a step, medians of {STEPS}")
    columns = ("sequences", "context", *times, "rest", "products alone", "reading alone", "tok/s")
    print("".join(f"{name:>16}" for name in columns))
    for sequences, context in product(map(int, args.sequences.split(",")), map(int, args.context.split(","))):
        prompts = [[random.randrange(1000, 40000) for _ in range(context)] for _ in range(sequences)]
        engine.generate(prompts, 2)
        for each in times.values():
            each.clear()
        engine.generate(prompts, STEPS)
        found = [1000 * statistics.median(each) for each in times.values()]
        alone = 1000 * products(weights, sequences)
        read = 1000 * (weight_bytes + sequences * context * token_bytes) / bandwidth
        row = (*found, found[0] - found[1] - found[2], alone, read, 1000 * sequences / found[0])
        print(f"{sequences:16}{context:16}" + "".join(f"{value:16.2f}" for value in row))


def timed(call: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def measured(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            into.append(time.perf_counter() - started)

    return measured


@torch.inference_mode()
def products(weights: list[PackedWeight], tokens: int) -> float:
    """Seconds of one product with each weight."""
    inputs = {columns: torch.randn(tokens, columns).bfloat16() for columns in {weight.columns for weight in weights}}
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        for weight in weights:
            weight.product(inputs[weight.columns])
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
