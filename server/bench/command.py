"""`outrider bench http`: its flags, its progress bar, and the run."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from server.bench.http import RequestResult, Target, run_load
from server.bench.report import show, summarize, to_builtins
from server.bench.workload import Body, file_prompts, random_prompts, request_body
from server.errors import UserError
from server.flags import Parser

_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def http_parser() -> Parser:
    """The parser of `outrider bench http`."""
    parser = Parser(
        prog="outrider bench http",
        description="Send load to any OpenAI server and print throughput and latencies.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="base URL of the server")
    add("--model", help="model name; the server's first model if not given")
    add("--endpoint", choices=list(_PATHS), default="completions", help="which endpoint to call")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), help="bearer token; OPENAI_API_KEY if not given")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--streams", type=_positive(int), help="requests open at once (1 without --rate, no limit with it)"
    )
    load.add_argument(
        "--rate", type=_positive(float), help="requests per second, at random moments, instead of at once"
    )
    load.add_argument("--requests", type=_positive(int), help="requests to send; 4 per stream, or 32, if not given")
    load.add_argument("--warmup", type=_natural, default=1, help="requests sent before and not counted")
    load.add_argument("--timeout", type=_positive(float), default=300.0, help="seconds of silence that fail a request")
    load.add_argument("--seed", type=int, default=0, help="seed of random prompts and pauses")
    shape = parser.add_argument_group("requests")
    shape.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one JSON or text a line, not random ones")
    shape.add_argument(
        "--random", choices=["ids", "words"], help="kind of random prompts; ids for completions, words for chat"
    )
    shape.add_argument(
        "--prompt-tokens", type=_positive(int), default=46, help="length of random prompts, in ids or words"
    )
    shape.add_argument("--vocab-size", type=_positive(int), default=10_000, help="random ids are below this")
    shape.add_argument("--max-tokens", type=_positive(int), default=128, help="tokens to generate at most")
    shape.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    shape.add_argument(
        "--ignore-eos", action="store_true", help="generate up to --max-tokens (vLLM's and our extension)"
    )
    add("--json", type=Path, metavar="PATH", help="also write the report as JSON")
    return parser


def bench_http(argv: Sequence[str], out: Console, progress: Console) -> int:
    """Run the benchmark that `argv` asks for; 0 when every request succeeded, else 1.

    Raises:
        UserError: a bad flag, prompts that cannot be used, a server that does not answer.
    """
    args = http_parser().parse_known(argv)
    streams = args.streams if args.streams or args.rate else 1
    count = args.requests or (4 * streams if streams else 32)
    base = args.url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    body = Body(
        args.endpoint, args.model or _first_model(base, headers), args.max_tokens, args.temperature, args.ignore_eos
    )
    total = count + args.warmup
    if args.prompts is not None:
        prompts = file_prompts(args.prompts, total)
    else:
        kind: Literal["ids", "words"] = args.random or ("ids" if args.endpoint == "completions" else "words")
        prompts = random_prompts(total, args.prompt_tokens, kind, args.vocab_size, args.seed)
    bodies = [request_body(body, prompt) for prompt in prompts]
    target = Target(base + _PATHS[args.endpoint], headers)

    async def run(part: list[dict[str, Any]], done: Callable[[RequestResult], None]) -> list[RequestResult]:
        return await run_load(
            target, part, streams=streams, rate=args.rate, seed=args.seed, timeout=args.timeout, done=done
        )

    if args.warmup:
        failed = [result for result in asyncio.run(run(bodies[count:], lambda _: None)) if result.error is not None]
        if len(failed) == args.warmup:
            raise UserError(f"{target.url}: {failed[0].error}")
    with Progress(
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=progress, transient=True
    ) as bar:
        task = bar.add_task("requests", total=count)
        results = asyncio.run(run(bodies[:count], lambda _: bar.advance(task)))
    report = summarize(results)
    show(report, out)
    if args.json is not None:
        args.json.write_text(json.dumps(to_builtins(report), indent=2) + "\n", encoding="utf-8")
    return 1 if report.failed else 0


def _first_model(base: str, headers: dict[str, str]) -> str:
    try:
        response = httpx.get(f"{base}/v1/models", headers=headers, timeout=10, trust_env=False)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        raise UserError(f"{base}/v1/models answered {error.response.status_code}; give --model and --api-key") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserError(f"no server answers at {base}: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise UserError(f"{base}/v1/models names no model; give --model") from None


def _positive(kind: Callable[[str], float]) -> Callable[[str], float]:
    def convert(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
        return value

    convert.__name__ = "number"
    return convert


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {text}")
    return value
