"""How long the API takes to answer others while it parses and tokenises very long prompts.

python benchmarks/api_latency.py [--mib 4] [--requests 10] [-- flags of outrider serve]

One client asks for /health every few milliseconds, first alone, then while another sends prompts of so many MiB, one
after the other (far over the model's limit, so each is tokenised and refused). Times are milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time

import httpx
from served import Served, serve_command

PAUSE = 0.002


async def compare(url: str, mib: float, requests: int) -> None:
    """Print both distributions."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 9))) for _ in range(5000)]
    text = " ".join(draw.choices(words, k=int(mib * 2**20 / 5)))[: int(mib * 2**20)]
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        await ask(client, asyncio.create_task(asyncio.sleep(1)))
        show("alone", await ask(client, asyncio.create_task(asyncio.sleep(5))))
        took: list[float] = []

        async def send() -> None:
            for _ in range(requests):
                started = time.perf_counter()
                response = await client.post("/v1/completions", json={"prompt": text, "max_tokens": 1})
                took.append(1000 * (time.perf_counter() - started))
                assert response.status_code == 400, response.text[:200]

        show(f"beside {mib:g} MiB", await ask(client, asyncio.create_task(send())))
        print(f"{'the prompts':16} p50 {statistics.median(took):7.1f}")


async def ask(client: httpx.AsyncClient, until: asyncio.Task[None]) -> list[float]:
    """Times of /health until the task is done."""
    times: list[float] = []
    while not until.done():
        started = time.perf_counter()
        (await client.get("/health")).raise_for_status()
        times.append(1000 * (time.perf_counter() - started))
        await asyncio.sleep(PAUSE)
    await until
    return times


def show(name: str, times: list[float]) -> None:
    """One line."""
    times.sort()
    print(
        f"{name:16} p50 {times[len(times) // 2]:7.1f}  p99 {times[len(times) * 99 // 100]:7.1f}"
        f"  most {times[-1]:7.1f}  ({len(times)} answers)"
    )


def main() -> None:
    own = sys.argv[1:]
    flags = own[own.index("--") + 1 :] if "--" in own else []
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=float, default=4.0)
    parser.add_argument("--requests", type=int, default=10)
    args = parser.parse_args(own[: own.index("--")] if "--" in own else own)
    server = Served(serve_command(*flags))
    try:
        asyncio.run(compare(server.url, args.mib, args.requests))
    finally:
        server.end()


if __name__ == "__main__":
    main()
