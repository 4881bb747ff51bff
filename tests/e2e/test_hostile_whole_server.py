"""Requests that must be refused without hurting anybody (cases a16, a21, e5, e6, e11)."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from live_server import LiveServer, Start
from streaming_clients import Stream

HUGE = 10**30
BAD_FIELDS: list[dict[str, Any]] = [
    {"n": 10**9},
    {"n": HUGE},
    {"n": 0},
    {"n": 1.5},
    {"best_of": 100},
    {"max_tokens": HUGE},
    {"max_tokens": 2**31 - 1},
    {"max_tokens": -1},
    {"min_tokens": 2**31 - 1},
    {"temperature": -1},
    {"temperature": 1e308},
    {"temperature": "1"},
    {"top_p": 0},
    {"top_p": 2},
    {"top_k": -5},
    {"top_k": HUGE},
    {"min_p": 7},
    {"repetition_penalty": 0},
    {"frequency_penalty": 1e9},
    {"logprobs": 10**6},
    {"prompt_logprobs": 10**6},
    {"seed": 2**80},
    {"stop": ["x"] * 10_000},
    {"stop": [""]},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": [10**9]},
    {"allowed_token_ids": []},
    {"bad_words": [""]},
    {"truncate_prompt_tokens": 0},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ["a", ""]},
    {"prompt": [[1], []]},
    {"prompt": [-1]},
    {"prompt": [10**6]},
    {"prompt": [2**63]},
    {"prompt": [True]},
    {"prompt": None},
    {"prompt": "a" * 2_000_000},
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_values_get_400_and_cost_nothing(stream: bool, tiny: LiveServer) -> None:
    beside = Stream(tiny, 200)
    processes = (psutil.Process(tiny.api_pid), tiny.engine)
    before = [process.memory_info().rss for process in processes]
    for fields in BAD_FIELDS:
        response = tiny.post("/v1/completions", **{"prompt": "a", "max_tokens": 4, "stream": stream} | fields)
        assert response.status_code == 400, (fields, response.text[:300])
        error = response.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"
    after = [process.memory_info().rss for process in processes]
    assert all(now - then < 64 * 2**20 for now, then in zip(after, before, strict=True))
    assert beside.finish_reason == "length"


def raw_post(server: LiveServer, content: bytes) -> tuple[int, bytes]:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
        connection.sendall(head.encode() + b"Content-Type: application/json\r\nConnection: close\r\n\r\n" + content)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    header, _, body = answer.partition(b"\r\n\r\n")
    return int(header.split()[1]), body


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "\\ud800", "max_tokens": 2}',
        b'{"prompt": "\\ud800", "max_tokens": 2, "stream": true}',
        b'{"prompt": "a\xff\xfe", "max_tokens": 2}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a"',
        b"[" * 100_000,
        b"",
        b"null",
    ],
)
def test_bodies_that_are_no_json_get_a_json_error(content: bytes, tiny: LiveServer) -> None:
    status, body = raw_post(tiny, content)
    assert status == 400, body
    message = json.loads(body)["error"]["message"]
    assert not any(word in message for word in ("Error", "Exception", "Traceback", "pydantic", "codec"))
    assert tiny.complete("a", max_tokens=1)["usage"]["completion_tokens"] == 1


async def test_a_pool_of_64_tokens(start: Start, tiny_folder: Path, tiny: LiveServer) -> None:
    """The longest sequence is what the cache holds; nothing beyond it is begun, all within it is finished."""
    server = start(str(tiny_folder), "--num-kv-blocks", "4", "--max-num-batched-tokens", "32").ready()
    limit = 64
    for length in range(limit - 2, limit + 2):
        prompt = [i % 300 for i in range(length)]
        for max_tokens in (None, 0, 1, 1000):
            fields = {"echo": True, "logprobs": 1} if max_tokens == 0 else {"ignore_eos": True}
            response = server.post("/v1/completions", prompt=prompt, max_tokens=max_tokens, **fields)
            wanted = min(limit - length, 16) if max_tokens is None else max_tokens
            if length + max(wanted, max_tokens is None) > limit:
                error = response.json()["error"]
                assert response.status_code == 400, (length, max_tokens)
                assert error["code"] == "context_length_exceeded"
                assert error["param"] == ("prompt" if length >= limit else "max_tokens")
                assert str(length) in error["message"] and str(limit) in error["message"]
            else:
                assert response.status_code == 200, (length, max_tokens, response.text)
                assert response.json()["usage"]["completion_tokens"] == wanted
    assert server.post("/v1/completions", prompt=[5] * 200).status_code == 400

    async def ask(client: httpx.AsyncClient, number: int) -> list[int]:
        body = {"prompt": [number] * 20, "max_tokens": 44, "temperature": 0, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body | {"return_token_ids": True})
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids

    async with server.client() as client:
        outputs = await asyncio.gather(*(ask(client, number) for number in range(8)))
    assert server.metric("outrider_preemptions_total") > 0
    for number, output in enumerate(outputs):
        assert output == tiny.token_ids([number] * 20, max_tokens=44, ignore_eos=True)
    server.wait_for(server.is_idle)
