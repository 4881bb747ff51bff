"""How long the API takes to answer others while it parses and tokenises very long texts.

python benchmarks/api_latency.py [--mib 4] [--requests 10] [-- flags of outrider serve]

One client asks for /health every few milliseconds: alone, while another sends prompts of so many MiB to
/v1/completions, one after the other (refused: they are far over the model's limit), and while it sends the same text to
/tokenize, which makes all its tokens. Times are milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
from served import Served, serve_command

PAUSE = 0.002


async def compare(url: str, mib: float, requests: int) -> None:
    """Print the distributions."""
    loop = asyncio.get_running_loop()
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        await ask(client, asyncio.create_task(asyncio.sleep(1)))
        show("alone", await ask(client, asyncio.create_task(asyncio.sleep(5))))
        # In a process of its own: what it takes to send such a body would be counted as the server's delay.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as sender:
            await loop.run_in_executor(sender, send, url + "/v1/completions", mib, 1)
            for path in ("/v1/completions", "/tokenize"):
                sending = loop.run_in_executor(sender, send, url + path, mib, requests)
                show(f"beside {path}", await ask(client, sending))
                print(f"{'':24} {await sending:7.1f} for {mib:g} MiB, median")


def send(url: str, mib: float, requests: int) -> float:
    """Send one text so many times; the median of what it took."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(1, 9))) for _ in range(5000)]
    text = " ".join(draw.choices(words, k=int(mib * 2**20 / 5)))[: int(mib * 2**20)]
    body = json.dumps({"prompt": text}).encode()
    took: list[float] = []
    for _ in range(requests):
        started = time.perf_counter()
        response = httpx.post(
            url, content=body, headers={"Content-Type": "application/json"}, timeout=120, trust_env=False
        )
        took.append(1000 * (time.perf_counter() - started))
        assert response.status_code == (200 if url.endswith("/tokenize") else 400), response.text[:200]
    return statistics.median(took)


async def ask(client: httpx.AsyncClient, until: asyncio.Future[Any]) -> list[float]:
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
        f"{name:24} p50 {times[len(times) // 2]:7.1f}  p99 {times[len(times) * 99 // 100]:7.1f}"
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
