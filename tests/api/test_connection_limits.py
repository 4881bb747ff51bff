"""What one connection may ask for and how long it may take, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from api_server import Api, eventually, listen, serve_api
from fake_engine import READY
from msgspec.structs import replace

from server.api import body
from server.api.connection import ConnectionLimits
from server.messages import EngineRequest

HEAD = b"GET /health HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
LIMITS = ConnectionLimits()


async def raw(url: str, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes as they are; the status, headers and body of the only answer."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        with contextlib.suppress(ConnectionError):  # the server may have heard enough
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode().rstrip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        return int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"]))
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("pieces", "status", "code"),
    [
        ((HEAD, b"X-Long: " + b"x" * LIMITS.head + b"\r\n\r\n"), 431, "head_too_large"),
        ((HEAD, b"X-Long: ", *[b"x" * 65536] * 200), 431, "head_too_large"),
        ((HEAD, b"".join(b"X-%d: y\r\n" % i for i in range(LIMITS.headers)), b"\r\n"), 431, "head_too_large"),
        ((b"GET /" + b"x" * LIMITS.url + b" HTTP/1.1\r\n\r\n",), 414, "url_too_long"),
        ((b"GET /", *[b"x" * 65536] * 200), 414, "url_too_long"),
        ((b"\x16\x03\x01\x02\x00\x01",), 400, "invalid_http"),
        ((b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",), 400, "invalid_http"),
        ((HEAD + b"X-Bad\x00: y\r\n\r\n",), 400, "invalid_http"),
        ((CHUNKED + b"ZZ\r\n{}\r\n0\r\n\r\n",), 400, "invalid_http"),
    ],
)
async def test_heads_have_a_size_and_a_form(pieces: tuple[bytes, ...], status: int, code: str) -> None:
    async with serve_api() as api, listen(api) as url:
        found, headers, content = await raw(url, *pieces)
        assert (found, json.loads(content)["error"]["code"]) == (status, code)
        assert headers["content-type"] == "application/json" and headers["x-request-id"]
        assert (await raw(url, HEAD + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n"))[0] == 200
        assert (await raw(url, HEAD + b"X-Long: " + b"x" * 30_000 + b"\r\n\r\n"))[0] == 200


async def test_a_body_that_breaks_off_in_nonsense_gets_one_answer() -> None:
    async with serve_api() as api, listen(api) as url:
        for head, statuses in ((CHUNKED, [b"400"]), (CHUNKED.replace(b"/tokenize", b"/health"), [b"405"])):
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            writer.write(head + b"2\r\n{ \r\n")
            if statuses == [b"405"]:  # answered without its body
                received = await reader.readuntil(b"}}")
            else:
                received = b""
                await asyncio.sleep(0.05)  # the route reads the body by now
            writer.write(b"ZZ\r\n}\r\n0\r\n\r\n")
            received += await reader.read()
            assert [line.split()[1] for line in received.splitlines() if line.startswith(b"HTTP/1.1")] == statuses
            writer.close()
        await eventually(lambda: [status for _, _, status in api.records.http] == [499, 405])
        assert (await raw(url, HEAD + b"\r\n"))[0] == 200


async def test_heads_and_bodies_have_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_IDLE_SECONDS", 0.1)
    async with serve_api() as api, listen(api, ConnectionLimits(head_seconds=1.0)) as url:
        slow_head = await raw(url, b"GET /health HT")
        slow_body = await raw(
            url, b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nContent-Type: application/json\r\n\r\n{"
        )
        for status, _, content in (slow_head, slow_body):
            assert (status, json.loads(content)["error"]["code"]) == (408, "too_slow")
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""  # one that says nothing at all is just closed
        writer.close()
        async with httpx.AsyncClient(base_url=url) as client:  # the time of a head begins anew with each request
            for _ in range(3):
                assert (await client.get("/health")).status_code == 200
                await asyncio.sleep(0.5)


@contextlib.asynccontextmanager
async def stalled(url: str, request: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A client that sends a request and reads nothing."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, (host, int(port)))
    content = json.dumps(request).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    await loop.sock_sendall(client, head.encode() + b"\r\n\r\n" + content)
    try:
        yield client
    finally:
        client.close()


async def rest_of(client: socket.socket) -> bytes:
    """What still arrives."""
    received = []
    with contextlib.suppress(ConnectionError):
        while data := await asyncio.get_running_loop().sock_recv(client, 65536):
            received.append(data)
    return b"".join(received)


def is_whole(answer: bytes) -> bool:
    return b"[DONE]" in answer or b'"total_tokens"' in answer


def endless(_: EngineRequest) -> list[int]:
    return [100, 101, 102]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_stalls_is_ended_and_a_slow_one_is_not(stream: bool) -> None:
    long = replace(READY, max_model_len=10**6)
    limits = ConnectionLimits(send_seconds=0.3)
    request = {"prompt": "Hi", "max_tokens": 900_000 if stream else 2000, "logprobs": 20, "stream": stream}
    async with serve_api(endless, ready=long) as api, listen(api, limits) as url:
        api.engine.burst = 50
        async with stalled(url, request) as client:
            await eventually(lambda: len(api.engine.requests) == 1)
            await eventually(lambda: any(status == 200 for _, _, status in api.records.http), seconds=20)
            assert api.link.open_sequences == api.engine.open_requests == 0
            assert api.records.finished[0].finish_reason == ("abort" if stream else "length")
            await asyncio.sleep(3 * limits.send_seconds)  # of a whole answer the route has long taken leave
            assert not is_whole(await rest_of(client))
        async with stalled(url, request | {"max_tokens": 100}) as client:
            loop, received = asyncio.get_running_loop(), b""
            while not is_whole(received):  # slower than the limit, on the whole
                await asyncio.sleep(0.005)
                data = await loop.sock_recv(client, 16384)
                assert data, received[-200:]
                received += data


async def test_silent_streams_say_that_they_live() -> None:
    async with serve_api("Hello world", sse_keep_alive=0.02) as api, listen(api) as url:
        api.engine.running.clear()
        lines: list[str] = []
        async with (
            httpx.AsyncClient(base_url=url) as client,
            client.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as response,
        ):
            async for line in response.aiter_lines():
                lines.append(line)
                if lines.count(": keep-alive") == 3:
                    api.engine.running.set()
        assert lines.count(": keep-alive") >= 3 and lines[-2] == "data: [DONE]"
        pieces = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-2] if line.startswith("data: ")]
        assert "".join(pieces) == "Hello world"


@pytest.mark.parametrize("seconds", [0.0, 60.0])
async def test_busy_streams_say_nothing_beside(seconds: float) -> None:
    async with serve_api("Hello world", sse_keep_alive=seconds) as api:
        response = await api.http.post("/v1/completions", json={"prompt": "Hi", "stream": True})
        assert not [line for line in response.text.splitlines() if line.startswith(":")]


async def waiting(api: Api, count: int, **headers: str) -> list[asyncio.Task[httpx.Response]]:
    """So many requests that the engine has and does not answer."""
    before = len(api.engine.requests)
    tasks = [
        asyncio.create_task(api.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers))
        for _ in range(count)
    ]
    await eventually(lambda: len(api.engine.requests) == before + count)
    return tasks


async def test_one_key_cannot_take_what_belongs_to_all() -> None:
    async with serve_api("Hello", api_keys=("a", "b"), max_inflight_per_key=2) as api:
        a, b = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        api.engine.running.clear()
        open_ones = await waiting(api, 2, **a)
        refused = await api.http.post("/v1/completions", json={"prompt": "Hi"}, headers=a)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
        assert int(refused.headers["retry-after"]) > 0 and api.records.rejections == ["key_limit"]
        assert (await api.http.get("/v1/models", headers=a)).status_code == 200  # costs nothing
        open_ones += await waiting(api, 2, **b)
        api.engine.running.set()
        assert [response.status_code for response in await asyncio.gather(*open_ones)] == [200] * 4
        for _ in range(5):  # errors give their place back, too
            assert (await api.http.post("/v1/completions", content=b"{", headers=a)).status_code == 400
        assert (await api.http.post("/v1/completions", json={"prompt": "Hi"}, headers=a)).status_code == 200


async def test_the_queue_has_a_length_in_tokens() -> None:
    async with serve_api("Hello", max_queued_tokens=10) as api:
        api.engine.running.clear()
        first = asyncio.create_task(api.complete(prompt=[5] * 20))  # an empty queue takes any prompt
        await eventually(lambda: api.link.queued_tokens == 20)
        response = await api.http.post("/v1/completions", json={"prompt": [5]})
        assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
        api.engine.running.set()
        await first
        assert api.link.queued_tokens == 0
        await api.complete(prompt=[5] * 9)
        api.engine.step_seconds = 0.005
        task = asyncio.create_task(api.complete(prompt=[5], max_tokens=100, ignore_eos=True))
        await eventually(lambda: api.link.open_sequences == 1 and api.link.queued_tokens == 0)  # one that runs
        await task


async def test_other_origins_are_let_in_only_by_name() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with serve_api() as api:
        response = await api.http.options("/v1/completions", headers=asked)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
    async with serve_api(allowed_origins=("https://a.example",), api_keys=("k",)) as api:
        preflight = await api.http.options(
            "/v1/completions", headers={**asked, "Access-Control-Request-Headers": "authorization,content-type"}
        )
        refused = await api.http.get("/v1/models", headers={"Origin": "https://a.example"})
        assert (preflight.status_code, refused.status_code) == (200, 401)
        for response in (preflight, refused):
            assert response.headers["access-control-allow-origin"] == "https://a.example"
            assert response.headers["x-request-id"]
        other = await api.http.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        assert "access-control-allow-credentials" not in preflight.headers
