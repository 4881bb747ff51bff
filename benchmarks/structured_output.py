"""What structured output costs: tokens per second with and without a grammar, in turns, on one server.

python benchmarks/structured_output.py [--streams 8] [--tokens 128] [--rounds 5] [-- flags of outrider serve]

Each kind sends the same prompts, sampled at temperature 1, and its grammar has no end within so many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from typing import Any

from served import Served, serve_command

from server.bench.http import Target, run_load
from server.bench.workload import Body, random_prompts, request_body

PEOPLE = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 8},
            "age": {"type": "integer"},
            "note": {"type": "string"},
        },
        "required": ["name", "age", "note"],
        "additionalProperties": False,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "plain text": {"ignore_eos": True},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE}}},
    "regex": {"structured_outputs": {"regex": r"([A-Z][a-z]{1,9}( [a-z]{1,9}){3,9}\. ){100,}"}},
    "grammar": {"structured_outputs": {"grammar": 'start: (WORD " "){200,}\nWORD: /[a-z]{1,12}/'}},
}


def main() -> None:
    own = sys.argv[1:]
    flags = own[own.index("--") + 1 :] if "--" in own else []
    parser = argparse.ArgumentParser()
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    server = Served(serve_command("--served-model-name", "model", *flags))
    try:
        target = Target(server.url + "/v1/completions", {})
        for fields in KINDS.values():  # the first answer waits for its grammar
            measure(target, fields, args.streams, args.tokens, seed=0)
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(args.rounds):
            for kind, fields in KINDS.items():
                rates[kind].append(measure(target, fields, args.streams, args.tokens, seed=turn + 1))
    finally:
        server.end()
    plain = rates["plain text"]
    print(f"{args.streams} streams, {args.tokens} tokens, medians of {args.rounds} rounds; flags: {flags or 'none'}")
    for kind, found in rates.items():
        ratio = statistics.median(rate / other for rate, other in zip(found, plain, strict=True))
        print(f"{kind:12} {statistics.median(found):8.1f} tok/s   {100 * (ratio - 1):+6.1f} %")


def measure(target: Target, fields: dict[str, Any], streams: int, tokens: int, seed: int) -> float:
    """Tokens per second over two requests a stream."""
    body = Body("completions", "model", tokens, 1.0, False)
    prompts = random_prompts(2 * streams, 46, "words", 0, seed)
    bodies = [request_body(body, prompt) | fields | {"seed": i} for i, prompt in enumerate(prompts)]
    run = run_load(target, bodies, streams=streams, rate=None, seed=0, timeout=300, done=lambda _: None)
    results = asyncio.run(run)
    for result in results:
        if result.error or result.completion_tokens < tokens:
            raise SystemExit(result.error or f"an answer ended after {result.completion_tokens} tokens: {fields}")
    seconds = max(result.ended for result in results) - min(result.started for result in results)
    return sum(result.completion_tokens for result in results) / seconds


if __name__ == "__main__":
    main()
