"""How many replicas a load needs: measures a server, then simulates many of it.

    python benchmarks/scaling.py measure --url http://127.0.0.1:8000 > service.json
    python benchmarks/scaling.py replicas service.json
    python benchmarks/scaling.py picker service.json
    python benchmarks/scaling.py autoscaler service.json

`measure` sends loads of several sizes, reads from /metrics how long steps took and what was in them, and fits
`base + per_row * rows + per_prompt_token * prompt tokens`. Where a machine is shared and the engine has one thread,
`--cpu-of PID` (the engine's) takes the CPU time that it spent instead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.scaling_model import (
    Autoscaler,
    Load,
    Outcome,
    Pick,
    Replica,
    Service,
    at_random,
    least_loaded,
    least_waiting,
    simulate,
)

MIXES = [(streams, prompt, answer) for streams in (1, 4, 16) for prompt, answer in ((32, 32), (300, 8))]
"""Streams, prompt tokens and answer tokens of each load that is measured."""


def counters(url: str, pid: int | None) -> dict[str, float]:
    """Totals of a server."""
    found = {"steps": 0.0, "seconds": 0.0, "prompt": 0.0, "answer": 0.0}
    text = httpx.get(url + "/metrics", timeout=30, trust_env=False).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "outrider_step_seconds_sum":
                found["seconds"] += sample.value
            elif sample.name == "outrider_step_seconds_count" and sample.labels["phase"] == "target":
                found["steps"] += sample.value
            elif sample.name == "outrider_prompt_tokens_total":
                found["prompt"] += sample.value
            elif sample.name == "outrider_generation_tokens_total":
                found["answer"] += sample.value
    if pid is not None:
        times = psutil.Process(pid).cpu_times()
        found["seconds"] = times.user + times.system
    return found


async def send(url: str, streams: int, prompt: int, answer: int, rounds: int) -> None:
    """`streams` requests at once, `rounds` times."""
    draw = random.Random(streams * 1000 + prompt)
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        for _ in range(rounds):
            bodies = [
                {
                    "prompt": [draw.randrange(100, 1000) for _ in range(prompt)],
                    "max_tokens": answer,
                    "ignore_eos": True,
                }
                for _ in range(streams)
            ]
            for response in await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies)):
                response.raise_for_status()


def fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float, float, float]:
    """Least squares of seconds by rows and prompt tokens; the last value is the mean relative error."""
    rows = np.array([[1.0, rows, prompt] for _, rows, prompt in points])
    seconds = np.array([seconds for seconds, _, _ in points])
    scaled = rows / seconds[:, None]  # so that a relative error counts the same for short and long steps
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(points)), rcond=None)
    error = float(np.abs(scaled @ found - 1).mean())
    return *(max(0.0, float(value)) for value in found), error  # type: ignore[return-value]


def measure(url: str, pid: int | None) -> None:
    """Print the service as JSON, the points on stderr."""
    asyncio.run(send(url, 4, 32, 8, 1))
    points = []
    for streams, prompt, answer in MIXES:
        before = counters(url, pid)
        asyncio.run(send(url, streams, prompt, answer, 1))
        change = {name: value - before[name] for name, value in counters(url, pid).items()}
        seconds, rows = change["seconds"] / change["steps"], change["answer"] / change["steps"]
        points.append((seconds, rows, change["prompt"] / change["steps"]))
        sys.stderr.write(
            f"{streams} streams of {prompt} + {answer}: {change['steps']:.0f} steps, {seconds * 1000:.1f} ms each, "
            f"{rows:.1f} rows, {points[-1][2]:.1f} prompt tokens\n"
        )
    base, per_row, per_prompt_token, error = fit(points)
    sys.stderr.write(f"mean error of the fit {error:.1%}\n")
    print(json.dumps(asdict(Service(base, per_row, per_prompt_token)), indent=1))


def steady(rate: float, prompt: float, answer: float, seconds: float) -> Load:
    """So many requests a second, all the time."""
    return Load(lambda _: rate, rate, seconds, prompt, answer)


def _long_enough(service: Service) -> float:
    """Seconds to simulate: some thousands of steps."""
    return max(60.0, min(300.0, 10_000 * service.base))


def meets(outcome: Outcome) -> bool:
    """Both objectives, 99 % each."""
    return outcome.late_first_share <= 0.01 and outcome.late_token_share <= 0.01


def most_rate(service: Service, replicas: int, prompt: float, answer: float, pick: Pick = least_loaded) -> float:
    """Requests per second that so many replicas bear."""
    seconds = _long_enough(service)
    low, high = (
        0.0,
        replicas * 1.05 / (service.per_row * answer / service.tokens_per_step + service.per_prompt_token * prompt),
    )
    while high - low > 0.02 * high:
        rate = (low + high) / 2
        good = meets(simulate(service, steady(rate, prompt, answer, seconds), replicas, pick))
        low, high = (rate, high) if good else (low, rate)
    return low


def show_replicas(service: Service, prompt: float, answer: float) -> None:
    """The table of replicas against load."""
    print("| replicas | requests/s within the objectives | per replica | busy | p99 TTFT, s |\n|---|---|---|---|---|")
    for replicas in (1, 2, 4, 8):
        rate = most_rate(service, replicas, prompt, answer)
        outcome = simulate(service, steady(rate, prompt, answer, _long_enough(service)), replicas, seed=1)
        print(
            f"| {replicas} | {rate:.2f} | {rate / replicas:.2f} | {outcome.utilisation:.0%} | "
            f"{outcome.first_token_quantile(0.99):.2f} |"
        )


def show_picker(service: Service, prompt: float, answer: float) -> None:
    """What choosing a replica brings, at the same load."""
    rate = 0.95 * most_rate(service, 4, prompt, answer)
    print(f"4 replicas, {rate:.2f} requests/s\n")
    print("| choice | late first tokens | late tokens | p99 TTFT, s |\n|---|---|---|---|")
    for name, pick in (("at random", at_random), ("fewest waiting", least_waiting), ("fewest in all", least_loaded)):
        outcome = simulate(service, steady(rate, prompt, answer, 2 * _long_enough(service)), 4, pick)
        print(
            f"| {name} | {outcome.late_first_share:.1%} | {outcome.late_token_share:.1%} | "
            f"{outcome.first_token_quantile(0.99):.2f} |"
        )


def show_autoscaler(service: Service, prompt: float, answer: float, start: float) -> None:
    """What a scaler should watch, while the load grows fourfold within five minutes."""
    one = most_rate(service, 1, prompt, answer)
    in_flight = max(1.0, simulate(service, steady(one, prompt, answer, _long_enough(service)), 1).in_flight)

    def rate(now: float) -> float:
        return one * (0.8 + 2.4 * min(1.0, max(0.0, (now - 120) / 300)))

    def by_waiting(replicas: Sequence[Replica]) -> int:
        waiting = sum(len(replica.waiting) for replica in replicas)
        return (
            len(replicas) + math.ceil(waiting / (4 * len(replicas))) if waiting > 2 * len(replicas) else len(replicas)
        )

    def by_cache(replicas: Sequence[Replica]) -> int:
        return math.ceil(sum(replica.kv_usage for replica in replicas) / 0.7)

    def by_in_flight(target: float) -> Callable[[Sequence[Replica]], int]:
        return lambda replicas: math.ceil(sum(replica.load for replica in replicas) / (target * in_flight))

    print(
        f"from {rate(0):.2f} to {rate(1e9):.2f} requests/s; a full replica has {in_flight:.0f} sequences in flight\n\n"
        "| watched | late first tokens | late tokens | most replicas | replica-minutes |\n|---|---|---|---|---|"
    )
    for name, scale in (
        ("waiting, above 2 a replica", by_waiting),
        ("KV cache, 70 %", by_cache),
        ("running + waiting, 90 % of a full replica's", by_in_flight(0.9)),
        ("running + waiting, 60 %", by_in_flight(0.6)),
    ):
        load = Load(rate, one * 3.2, 900, prompt, answer)
        outcome = simulate(service, load, 2, autoscaler=Autoscaler(scale, start=start))
        print(
            f"| {name} | {outcome.late_first_share:.1%} | {outcome.late_token_share:.1%} | {outcome.most_replicas} | "
            f"{outcome.replica_seconds / 60:.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--url", default="http://127.0.0.1:8000")
    one.add_argument("--cpu-of", type=int, metavar="PID")
    for name in ("replicas", "picker", "autoscaler"):
        two = commands.add_parser(name)
        two.add_argument("service", type=Path)
        two.add_argument("--prompt-tokens", type=float, default=200)
        two.add_argument("--answer-tokens", type=float, default=100)
        two.add_argument("--max-num-batched-tokens", type=int, help="instead of what the file says")
        two.add_argument("--start-seconds", type=float, default=60.0, help="until a new replica is ready")
        two.add_argument("--tokens-per-step", type=float, default=1.0, help="the acceptance length, with drafts")
    arguments = parser.parse_args()
    if arguments.command == "measure":
        measure(arguments.url, arguments.cpu_of)
        return
    service = replace(Service(**json.loads(arguments.service.read_text())), tokens_per_step=arguments.tokens_per_step)
    if arguments.max_num_batched_tokens is not None:
        service = replace(service, max_batched_tokens=arguments.max_num_batched_tokens)
    prompt, answer = arguments.prompt_tokens, arguments.answer_tokens
    if arguments.command == "replicas":
        show_replicas(service, prompt, answer)
    elif arguments.command == "picker":
        show_picker(service, prompt, answer)
    else:
        show_autoscaler(service, prompt, answer, arguments.start_seconds)


if __name__ == "__main__":
    main()
