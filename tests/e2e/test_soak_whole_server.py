"""Crowds that behave badly: whatever they do, the server is afterwards what it was (cases d1, d10, e3, e4)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
from live_server import LiveServer, Start, samples
from streaming_clients import Stream
from test_aborts_whole_server import abort_many

MIB = 2**20
Record = Callable[[str, object], None]
"""Keeps a figure in the report of the run (`--junitxml`)."""
SLOW_READERS = 50
STALLED = "read nothing for 2 seconds"


def resident(server: LiveServer) -> list[float]:
    """MiB of the API process and of the engine."""
    return [process.memory_info().rss / MIB for process in (psutil.Process(server.api_pid), server.engine)]


async def read_slowly(server: LiveServer, number: int, stop: asyncio.Event) -> None:
    """Ask for a long stream with much beside the text (1.5 KB a token); read a little of it, or nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    body = {"prompt": "a", "max_tokens": 600, "ignore_eos": True, "stream": True, "logprobs": 20, "seed": number}
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(client, (host, int(port)))
        await loop.sock_sendall(client, head.encode() + b"\r\n\r\n" + content)
        with contextlib.suppress(ConnectionError):
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    if number % 2:
                        await asyncio.wait_for(loop.sock_recv(client, 512), 0.5)
                    await asyncio.wait_for(stop.wait(), 0.5)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_slow_readers_are_ended_and_leave_nothing(
    start: Start, tiny_folder: Path, record_property: Record
) -> None:
    server = start(str(tiny_folder), "--num-kv-blocks", "8192", "--send-timeout", "2").ready()
    figures = []
    for ended in (10, 20, 30):
        stop = asyncio.Event()
        readers = [asyncio.create_task(read_slowly(server, number, stop)) for number in range(SLOW_READERS)]
        await asyncio.to_thread(server.wait_for, lambda: server.metric("outrider_requests_running") > 0)
        assert (await asyncio.to_thread(server.complete, "a", max_tokens=5))["usage"]["completion_tokens"] == 5
        await asyncio.to_thread(server.wait_for, lambda ended=ended: server.log.count(STALLED) >= ended, 120)
        stop.set()
        await asyncio.to_thread(server.wait_for, server.is_idle, 60)
        await asyncio.gather(*readers)
        figures.append(resident(server))
    record_property("MiB after each round", figures)
    assert all(third - first < 24 for first, third in zip(figures[0], figures[2], strict=True)), figures


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_five_hundred_aborts_leave_nothing(tiny: LiveServer, record_property: Record) -> None:
    figures = []
    for _ in range(5):
        await abort_many(tiny, 100)
        await asyncio.to_thread(tiny.wait_for, tiny.is_idle, 60)
        figures.append(resident(tiny))
    record_property("MiB after each hundred", figures)
    assert all(fifth - second < 16 for second, fifth in zip(figures[1], figures[4], strict=True)), figures
    assert tiny.metric("outrider_requests_total", finish_reason="error") == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_five_thousand_short_requests_leave_nothing(tiny: LiveServer, record_property: Record) -> None:
    draw = random.Random(5)
    gate = asyncio.Semaphore(16)
    figures = []

    async def one(client: httpx.AsyncClient) -> int:
        body = {"prompt": [draw.randrange(300) for _ in range(8)], "max_tokens": 2, "stream": draw.random() < 0.5}
        async with gate:
            return (await client.post("/v1/completions", json=body)).status_code

    async with tiny.client() as client:
        for _ in range(5):
            assert set(await asyncio.gather(*(one(client) for _ in range(1000)))) == {200}
            await asyncio.to_thread(tiny.wait_for, tiny.is_idle, 10)
            figures.append(resident(tiny))
    record_property("MiB after each thousand", figures)
    assert all(fifth - second < 16 for second, fifth in zip(figures[1], figures[4], strict=True)), figures


async def test_metrics_are_told_under_load(tiny: LiveServer) -> None:
    """Case d10: 64 streams and a prompt of 8,000 tokens, and each scrape of ten a second is whole."""
    busy = True

    async def scrape() -> int:
        count = 0
        async with httpx.AsyncClient(base_url=tiny.url, timeout=20, trust_env=False) as client:
            while busy:
                text = (await client.get("/metrics")).text
                values = {name: value for name, _, value in samples(text)}
                assert "outrider_requests_running" in values
                count += 1
                await asyncio.sleep(0.1)
        return count

    scraping = asyncio.create_task(scrape())
    async with tiny.client() as client:
        bodies = [
            {"prompt": [number], "max_tokens": 20, "ignore_eos": True, "stream": True} for number in range(64)
        ] + [{"prompt": [5] * 8000, "max_tokens": 1}]
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    busy = False
    assert await scraping > 3
    assert {answer.status_code for answer in answers} == {200}
    tiny.wait_for(tiny.is_idle)


def test_gauges_are_back_at_zero_once_all_clients_have_left(tiny: LiveServer) -> None:
    """Case d1: without any new work that would make the engine tell of itself."""
    asyncio.run(abort_many(tiny, 32))
    tiny.wait_for(tiny.is_idle)
    beside = Stream(tiny, 5)
    assert beside.finish_reason == "length"
    tiny.wait_for(tiny.is_idle)
