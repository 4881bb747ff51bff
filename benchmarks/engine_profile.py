"""Where a decode step's time goes on CUDA: the kernels of some steps, and what the device idles between them.

python benchmarks/engine_profile.py qwen3-8b 32 [--draft] [--eager] [--rounds 20]
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from server.bench.shapes import SHAPES, eagle3_head, write_shape
from server.config import Settings
from server.engine.in_process import InProcessEngine
from server.messages import EngineRequest, SamplingParams

SYNTHETIC = {
    "method": "eagle3",
    "num_speculative_tokens": 3,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_length": 3.0,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("batches", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--top", type=int, default=16)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = {
            "model": str(write_shape(folder / "target", SHAPES[arguments.shape])),
            "load_format": "dummy",
            "enable_prefix_caching": False,
            "block_size": 64,
            "enforce_eager": arguments.eager,
            "max_num_seqs": max(arguments.batches),
        }
        if arguments.draft:
            head = write_shape(folder / "head", eagle3_head(SHAPES[arguments.shape]))
            options["speculative"] = {**SYNTHETIC, "model": str(head)}
        engine = InProcessEngine(Settings.model_validate(options))
    print(json.dumps({row.component: row.resolved for row in engine.ready.rows if row.role == "target"}))
    print(f"ready in {engine.ready.load_seconds:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB allocated")
    for batch in arguments.batches:
        one_batch(engine, batch, arguments)


def one_batch(engine: InProcessEngine, batch: int, arguments: argparse.Namespace) -> None:
    draw = random.Random(batch).randrange
    vocab = SHAPES[arguments.shape]["vocab_size"]
    for i in range(batch):
        prompt = [draw(vocab) for _ in range(arguments.prompt_tokens)]
        params = SamplingParams(max_tokens=400, seed=i, temperature=0.0)
        engine.link.inbox.append(EngineRequest(10_000 * batch + i, prompt, params, arrived=float(i)))
    ids = [10_000 * batch + i for i in range(batch)]
    while not all(engine.link.outputs.get(request_id) for request_id in ids):
        engine.core.round()
    for _ in range(8):
        engine.core.round()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(arguments.rounds):
        engine.core.round()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - started) / arguments.rounds
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(arguments.rounds):
            engine.core.round()
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    total: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    busy, reached = 0.0, 0.0
    for start, end, name in spans:
        total[name][0] += end - start
        total[name][1] += 1
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    elapsed = spans[-1][1] - spans[0][0]
    rounds = arguments.rounds
    print(
        f"\n== {arguments.shape} batch {batch}{' + draft' if arguments.draft else ''}: {1000 * wall:.3f} ms a step; "
        f"profiled: {elapsed / rounds / 1000:.3f} ms a step, kernels busy {busy / rounds / 1000:.3f} ms, "
        f"{len(spans) / rounds:.0f} kernels a step"
    )
    for name, (micros, count) in sorted(total.items(), key=lambda item: -item[1][0])[: arguments.top]:
        print(f"{micros / rounds / 1000:8.3f} ms {count / rounds:7.1f} x {micros / count:8.2f} us  {name[:110]}")
    engine.core._scheduler.abort(ids)
    while engine.core._scheduler.running or engine.core._pipeline is not None and engine.core._pipeline.busy:
        engine.core.round()
    engine.link.outputs.clear()
    engine.link.ended.clear()


if __name__ == "__main__":
    main()
