"""Clients that go away at random moments leave nothing behind in the engine (cases d1, e3, e4)."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from live_server import LiveServer
from streaming_clients import Stream
from tiny_checkpoint import VOCAB_SIZE

AT_ONCE = 24


async def leave(server: LiveServer, body: dict[str, Any], moment: tuple[str, float]) -> None:
    """Send a request and close the connection: after so many lines of the answer, or so many seconds."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    writer.write(head.encode() + b"\r\n\r\n" + content)
    await writer.drain()
    kind, amount = moment
    if kind == "seconds":
        await asyncio.sleep(amount)
    else:
        seen = 0
        while seen < amount:
            line = await reader.readline()
            if not line or line.startswith(b"data: [DONE]"):
                break
            seen += line.startswith(b"data: ")
    writer.transport.abort()


def random_request(draw: random.Random) -> tuple[dict[str, Any], tuple[str, float]]:
    stream, max_tokens = draw.random() < 0.6, draw.randint(1, 40)
    body: dict[str, Any] = {
        "prompt": [draw.randrange(VOCAB_SIZE) for _ in range(draw.choice((1, 5, 16, 60, 200)))],
        "n": draw.choice((1, 1, 1, 3)),
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
        "seed": draw.randrange(1000),
    }
    # Before the first token, in the middle, and when the last one is on its way.
    after_lines = ("lines", draw.choice((1, max_tokens // 2, max_tokens - 1, max_tokens)) * body["n"])
    after_seconds = ("seconds", draw.choice((0.0, 0.002, 0.02, 0.1)))
    return body, after_lines if stream and draw.random() < 0.7 else after_seconds


async def abort_many(server: LiveServer, count: int) -> None:
    draw = random.Random(3)
    gate = asyncio.Semaphore(AT_ONCE)

    async def one() -> None:
        async with gate:
            await leave(server, *random_request(draw))

    await asyncio.gather(*(one() for _ in range(count)))


@pytest.mark.parametrize("crowded", [False, True])
async def test_aborts_at_random_moments(crowded: bool, request: pytest.FixtureRequest) -> None:
    server: LiveServer = request.getfixturevalue("tiny_crowded" if crowded else "tiny")
    engine = server.engine
    asked = [([7 * i % VOCAB_SIZE, i], 5 + i % 9) for i in range(20)]
    before = [server.token_ids(prompt, max_tokens=count, ignore_eos=True) for prompt, count in asked]
    aborted = server.metric("outrider_requests_total", finish_reason="abort")
    await abort_many(server, 250)
    server.wait_for(server.is_idle, seconds=10)
    assert server.metric("outrider_requests_total", finish_reason="abort") > aborted
    assert server.metric("outrider_requests_total", finish_reason="error") == 0
    after = [server.token_ids(prompt, max_tokens=count, ignore_eos=True) for prompt, count in asked]
    assert after == before
    # The idle engine accounts for every block, and ends when one is lost.
    server.wait_for(server.is_idle)
    assert engine.is_running() and server.status("/health") == 200
    assert "Traceback" not in server.log


@pytest.mark.parametrize("stream", [True, False])
async def test_all_choices_end_with_their_client_and_count_as_aborted(tiny: LiveServer, stream: bool) -> None:
    tiny.wait_for(tiny.is_idle)
    aborted = tiny.metric("outrider_requests_total", finish_reason="abort")
    body = {"prompt": ["a", "b"], "n": 3, "max_tokens": 5000, "ignore_eos": True, "stream": stream}
    moment = asyncio.create_task(leave(tiny, body, ("seconds", 0.5)))
    while tiny.metric("outrider_requests_running") < 6:
        await asyncio.sleep(0.01)
        assert not moment.done()
    await moment
    tiny.wait_for(tiny.is_idle, seconds=10)
    assert tiny.metric("outrider_requests_total", finish_reason="abort") == aborted + 6


async def test_normal_ends_abort_nothing(tiny: LiveServer) -> None:
    aborted = tiny.metric("outrider_requests_total", finish_reason="abort")
    for stream in (True, False):
        assert tiny.post("/v1/completions", prompt="a", n=2, max_tokens=4, stream=stream).status_code == 200
    tiny.wait_for(tiny.is_idle)
    assert tiny.metric("outrider_requests_total", finish_reason="abort") == aborted


def test_others_go_on_while_clients_leave(tiny: LiveServer) -> None:
    stays = Stream(tiny, 300, return_token_ids=True, temperature=0)
    asyncio.run(abort_many(tiny, 50))
    events = stays.end()
    ids = [token for event in events[:-1] for choice in event["choices"] for token in choice["token_ids"]]
    assert ids == tiny.token_ids("a", max_tokens=300, ignore_eos=True)
