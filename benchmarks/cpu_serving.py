"""The embedded default on the CPU, over HTTP, beside transformers on the same weights, in one run.

python benchmarks/cpu_serving.py [--threads 2] [--new 64] [--rounds 3] [--json FILE] [-- flags of outrider serve]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PROMPT = 46
LONG = 1024
STREAMS = (1, 8, 32)


def main() -> None:
    own = sys.argv[1:]
    flags = own[own.index("--") + 1 :] if "--" in own else []
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--new", type=int, default=64, help="tokens generated per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    peer = {} if args.no_peer else peer_rates(args.threads, args.new, args.rounds)
    ours = server_rates(args.new, args.rounds, flags)
    print(f"\ntok/s, median of {args.rounds}; {PROMPT}-token prompts, {args.new} new tokens, {args.threads} threads")
    print(f"{'':24}{'outrider (HTTP)':>18}{'transformers bf16':>20}")
    for name, value in ours.items():
        other = f"{peer[name]:20.1f}" if name in peer else ""
        print(f"{name:24}{value:18.1f}{other}")
    if args.json:
        args.json.write_text(json.dumps({"outrider": ours, "transformers": peer}, indent=2))


def server_rates(new: int, rounds: int, flags: list[str]) -> dict[str, float]:
    started = time.monotonic()
    command = [sys.executable, "-m", "server", "serve", "--port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = ""
        for line in server.stdout:
            if match := re.search(r"ready at (http://[\d.:]+)", line):
                url = match[1]
                break
        ready = time.monotonic() - started
        rates: dict[str, float] = {"ready (s)": ready}
        for streams in STREAMS:
            reports = [bench(url, streams, PROMPT, new) for _ in range(rounds)]
            rates[f"{streams} streams"] = statistics.median(r["output_tokens_per_second"] for r in reports)
            rates[f"{streams} streams, decode"] = statistics.median(
                1000 * streams / r["time_per_output_token_ms"]["p50"] for r in reports
            )
        reports = [bench(url, 1, LONG, 1) for _ in range(rounds)]
        rates[f"prefill {LONG}"] = statistics.median(1000 * LONG / r["time_to_first_token_ms"]["p50"] for r in reports)
        return rates
    finally:
        server.terminate()
        server.wait()


def bench(url: str, streams: int, prompt: int, new: int) -> dict[str, dict[str, float]]:
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        subprocess.run(
            [sys.executable, "-m", "server", "bench", "http", "--url", url, "--streams", str(streams)]
            + ["--requests", str(max(3, streams)), "--prompt-tokens", str(prompt), "--max-tokens", str(new)]
            + ["--ignore-eos", "--temperature", "0", "--seed", str(time.time_ns() % 10**9), "--json", out.name],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return json.loads(Path(out.name).read_text())


def peer_rates(threads: int, new: int, rounds: int) -> dict[str, float]:
    """In a process of its own, so that nothing of it stays."""
    code = subprocess.run(
        [sys.executable, __file__, "--as-peer", str(threads), str(new), str(rounds)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(code.stdout)


def run_peer(threads: int, new: int, rounds: int) -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
    from oracle import smollm2_model

    torch.set_num_threads(threads)
    model = smollm2_model().to(torch.bfloat16).eval()
    rates: dict[str, float] = {}

    def timed(batch: int, prompt: int, count: int) -> float:
        ids = torch.randint(1000, 40000, (batch, prompt))
        started = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    with torch.inference_mode():
        timed(1, PROMPT, 2)
        for streams in STREAMS:
            rates[f"{streams} streams"] = statistics.median(
                streams * new / timed(streams, PROMPT, new) for _ in range(rounds)
            )
        rates[f"prefill {LONG}"] = statistics.median(LONG / timed(1, LONG, 1) for _ in range(rounds))
    print(json.dumps(rates))


if __name__ == "__main__":
    if "--as-peer" in sys.argv:
        run_peer(*map(int, sys.argv[-3:]))
    else:
        main()
