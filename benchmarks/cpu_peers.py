"""The embedded default on a CPU beside llama.cpp and transformers, on the same weights, in one run.

python benchmarks/cpu_peers.py [--threads 2] [--new 64] [--rounds 3] [--json FILE] [-- flags of outrider serve]

Outrider and llama.cpp (`pip install xllamacpp`: its server, the GGUF as it is) are measured over HTTP by `outrider
bench http`, transformers (the weights dequantised to bfloat16) in a process of its own. Drafts, a packaged head's too,
are off unless the flags ask for them. All are up from the start; rounds take turns, so that a slow minute of the
machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from served import Served, peak_bytes, serve_command

PROMPT = 46
LONG = 1024
STREAMS = (1, 8, 32)
ATTEMPTS = 3
"""llama.cpp's server now and then closes a connection on which a request is under way; such a run is repeated."""
Rates = dict[str, float]


def main() -> None:
    own = sys.argv[1:]
    flags = own[own.index("--") + 1 :] if "--" in own else []
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--new", type=int, default=64, help="tokens generated per request")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=("outrider", "llama.cpp", "transformers"), action="append")
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    if not any(flag.startswith("--speculative") for flag in flags):
        flags += ["--speculative-config", '{"method": "none"}']
        peers = {
            "outrider": lambda: HttpPeer(serve_command(*flags)),
            "llama.cpp": lambda: HttpPeer([sys.executable, __file__, "--as-llama", str(args.threads)]),
            "transformers": lambda: TransformersPeer(args.threads),
        }
    running = {name: start() for name, start in peers.items() if name in (args.only or peers)}
    try:
        rates = {name: {"ready (s)": peer.ready} for name, peer in running.items()}
        for streams in STREAMS:
            rounds(running, rates, args.rounds, lambda peer, streams=streams: peer.generate(streams, args.new))
        rounds(running, rates, args.rounds, lambda peer: peer.prefill())
        for name, peer in running.items():
            rates[name]["memory peak (MiB)"] = peer.peak / 2**20
    finally:
        for peer in running.values():
            peer.end()
    print(f"{cpu_name()}, {args.threads} threads; flags: {flags or 'none'}")
    print(f"tok/s, median of {args.rounds} rounds; {PROMPT}-token prompts, {args.new} new tokens")
    print(f"{'':24}" + "".join(f"{name:>16}" for name in rates))
    for what in dict.fromkeys(key for own in rates.values() for key in own):
        line = (f"{own[what]:16.1f}" if what in own else f"{'':16}" for own in rates.values())
        print(f"{what:24}" + "".join(line))
    if args.json:
        args.json.write_text(json.dumps(rates, indent=2))


def rounds(running: dict[str, Peer], rates: dict[str, Rates], count: int, measure: Callable[[Peer], Rates]) -> None:
    """Let all take turns, and note the medians."""
    found: dict[str, list[Rates]] = {name: [] for name in running}
    for _ in range(count):
        for name, peer in running.items():
            found[name].append(measure(peer))
    for name, each in found.items():
        rates[name] |= {what: statistics.median(one[what] for one in each) for what in each[0]}


class HttpPeer:
    """A server that says where it is ready."""

    def __init__(self, command: list[str]) -> None:
        self.server = Served(command)
        self.ready = self.server.ready
        self.bench(1, PROMPT, 8)

    def generate(self, streams: int, new: int) -> Rates:
        report = self.bench(streams, PROMPT, new)
        return {
            f"{streams} streams": report["output_tokens_per_second"],
            f"{streams} streams, decode": 1000 * streams / report["time_per_output_token_ms"]["p50"],
        }

    def prefill(self) -> Rates:
        return {f"prefill {LONG}": 1000 * LONG / self.bench(1, LONG, 1)["time_to_first_token_ms"]["p50"]}

    @property
    def peak(self) -> int:
        return self.server.peak

    def bench(self, streams: int, prompt: int, new: int) -> dict:
        load = f"--streams {streams} --requests {max(3, streams)} --prompt-tokens {prompt} --max-tokens {new}"
        load += f" --ignore-eos --temperature 0 --seed {time.time_ns() % 10**9} --url {self.server.url}"
        command = [sys.executable, "-m", "server", "bench", "http", *load.split()]
        for _ in range(ATTEMPTS):
            with tempfile.NamedTemporaryFile(suffix=".json") as out:
                done = subprocess.run(
                    [*command, "--json", out.name],
                    check=False,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                if not done.returncode:
                    return json.loads(Path(out.name).read_text())
        raise SystemExit(f"outrider bench http against {self.server.url} failed: {done.stdout[-2000:]}")

    def end(self) -> None:
        self.server.end()


class TransformersPeer:
    """A process that generates on demand: it reads "batch prompt new" and writes seconds."""

    def __init__(self, threads: int) -> None:
        started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--as-transformers", str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.seconds(1, PROMPT, 2)
        self.ready = time.monotonic() - started

    def seconds(self, batch: int, prompt: int, new: int) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{batch} {prompt} {new}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def generate(self, streams: int, new: int) -> Rates:
        return {f"{streams} streams": streams * new / self.seconds(streams, PROMPT, new)}

    def prefill(self) -> Rates:
        return {f"prefill {LONG}": LONG / self.seconds(1, LONG, 1)}

    @property
    def peak(self) -> int:
        return peak_bytes(self.process.pid)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


Peer = HttpPeer | TransformersPeer


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"


def serve_llama(threads: int) -> None:
    import xllamacpp

    from server.checkpoint.locate import locate

    params = xllamacpp.CommonParams()
    params.model.path = str(locate(None).path)
    params.n_parallel = max(STREAMS)
    params.n_ctx = max(STREAMS) * 2 * LONG
    params.port = 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    print("ready at", server.listening_address, flush=True)
    while True:
        time.sleep(3600)


def generate_with_transformers(threads: int) -> None:
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
    from oracle import smollm2_model

    torch.set_num_threads(threads)
    model = smollm2_model().to(torch.bfloat16).eval()
    for line in sys.stdin:
        batch, prompt, new = map(int, line.split())
        ids = torch.randint(1000, 40000, (batch, prompt))
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
                pad_token_id=0,
            )
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    if "--as-llama" in sys.argv:
        serve_llama(int(sys.argv[-1]))
    elif "--as-transformers" in sys.argv:
        generate_with_transformers(int(sys.argv[-1]))
    else:
        main()
