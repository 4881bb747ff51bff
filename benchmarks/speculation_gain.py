"""What drafts gain: tokens per second with and without them over real prompts, in turns, by number of streams.

python benchmarks/speculation_gain.py [--streams 1 8 32] [--tokens 96] [--rounds 5] [--warmup 4] [-- flags of serve]

One server drafts as the flags say (without any: the embedded model and its head), the other is the same without drafts.
Each round sends 12 of the 100 held-out prompts, or two a stream, to either, as chat, greedily.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path

import httpx
from served import Served, serve_command

from server.bench.http import Target, run_load
from server.bench.workload import Body, file_prompts, request_body

PROMPTS = Path(__file__).parents[1] / "tools" / "train_draft" / "held_out.jsonl"


def main() -> None:
    own = sys.argv[1:]
    flags = own[own.index("--") + 1 :] if "--" in own else []
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4, help="rounds before, in which k settles")
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    drafting = serve_command("--served-model-name", "model", *flags)
    plain = [*drafting, "--speculative-config", '{"method": "none"}']
    servers = [Served(plain), Served(drafting)]
    print(f"up to {args.tokens} tokens, medians of {args.rounds} rounds; flags: {flags or 'none'}")
    try:
        for streams in args.streams:
            rates: list[list[float]] = [[], []]
            before = drafted(servers[1])
            for turn in range(args.warmup + args.rounds):
                for server, found in zip(servers, rates, strict=True):
                    rate = measure(server, streams, args.tokens, turn)
                    if turn >= args.warmup:
                        found.append(rate)
            ratio = statistics.median(new / old for old, new in zip(*rates, strict=True))
            steps, tokens = (after - was for after, was in zip(drafted(servers[1]), before, strict=True))
            old, new = map(statistics.median, rates)
            length = 1 + tokens / max(1, steps)
            print(f"{streams:3} streams: plain {old:7.1f} tok/s, drafting {new:7.1f}, {ratio:5.3f} times", end="; ")
            print(f"{steps:.0f} drafts, {length:.2f} tokens each", flush=True)
    finally:
        for server in servers:
            server.end()


def measure(server: Served, streams: int, tokens: int, turn: int) -> float:
    """Tokens per second over one round."""
    prompts = file_prompts(PROMPTS, 100)
    count = max(12, 2 * streams)
    body = Body("chat", "model", tokens, 0.0, False)
    bodies = [request_body(body, prompts[(turn * count + i) % len(prompts)]) for i in range(count)]
    target = Target(server.url + "/v1/chat/completions", {})
    run = run_load(target, bodies, streams=streams, rate=None, seed=0, timeout=300, done=lambda _: None)
    results = asyncio.run(run)
    for result in results:
        if result.error:
            raise SystemExit(result.error)
    seconds = max(result.ended for result in results) - min(result.started for result in results)
    return sum(result.completion_tokens for result in results) / seconds


def drafted(server: Served) -> tuple[float, float]:
    """Drafts so far, and their accepted tokens."""
    totals = {"outrider_spec_decode_drafts_total": 0.0, "outrider_spec_decode_accepted_tokens_total": 0.0}
    for line in httpx.get(server.url + "/metrics").text.splitlines():
        name = line.split("{")[0].split(" ")[0]
        if name in totals:
            totals[name] += float(line.rsplit(" ", 1)[1])
    return tuple(totals.values())  # type: ignore[return-value]


if __name__ == "__main__":
    main()
