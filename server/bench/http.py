"""The load generator: sends streamed requests to an OpenAI server and notes when each event came."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec


@dataclass(frozen=True)
class RequestResult:
    """One request as its client saw it. Times are seconds."""

    started: float
    """time.perf_counter() when it was sent."""
    ended: float
    first_token: float | None
    """From sending to the first event that carries text."""
    gaps: tuple[float, ...]
    """Between events that carry text; one event may carry several tokens."""
    decode_seconds: float
    """From the first of those events to the last."""
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None


@dataclass(frozen=True)
class Target:
    """Where the requests go."""

    url: str
    """Of the endpoint, whole."""
    headers: dict[str, str]


async def run_load(
    target: Target,
    bodies: Sequence[dict[str, Any]],
    *,
    streams: int | None,
    rate: float | None,
    seed: int,
    timeout: float,
    done: Callable[[RequestResult], None],
) -> list[RequestResult]:
    """Send every body once and wait for all answers.

    Args:
        target: the endpoint.
        bodies: JSON bodies with stream and include_usage set.
        streams: so many requests are open at any time; None for no limit.
        rate: requests per second with exponentially distributed pauses; None to send as soon as a stream is free.
        seed: draws the pauses.
        timeout: seconds without a byte after which a request counts as failed.
        done: called after each request.
    """
    gate = asyncio.Semaphore(streams if streams is not None else len(bodies))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    results: list[RequestResult] = []

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        try:
            result = await send(client, target, body)
        finally:
            gate.release()
        results.append(result)
        done(result)

    # trust_env: a proxy set for the internet must not stand between the generator and the server
    async with (
        httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client,
        asyncio.TaskGroup() as tasks,
    ):
        async for body in _paced(bodies, rate, seed):
            await gate.acquire()
            tasks.create_task(one(client, body))
    return results


async def send(client: httpx.AsyncClient, target: Target, body: dict[str, Any]) -> RequestResult:
    """Send one request and read its stream; whatever goes wrong is in the result's `error`."""
    started = time.perf_counter()
    moments: list[float] = []
    usage: dict[str, Any] = {}
    error: str | None = None
    try:
        async with client.stream("POST", target.url, json=body, headers=target.headers) as response:
            if response.status_code != 200:
                await response.aread()
                error = f"HTTP {response.status_code}: {_message(response)}"
            else:
                error = "the stream ended without [DONE]"
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    now = time.perf_counter()
                    data = line[5:].strip()
                    if data == "[DONE]":
                        error = None if error == "the stream ended without [DONE]" else error
                        continue
                    event = msgspec.json.decode(data)
                    if "error" in event:
                        error = str(event["error"].get("message", event["error"]))
                    if _has_text(event):
                        moments.append(now)
                    usage = event.get("usage") or usage
    except (httpx.HTTPError, msgspec.DecodeError) as problem:
        error = f"{type(problem).__name__}: {problem}".rstrip(": ")
    if error is None and not usage:
        error = "the answer has no usage: the server does not know stream_options.include_usage"
    return RequestResult(
        started=started,
        ended=time.perf_counter(),
        first_token=moments[0] - started if moments else None,
        gaps=tuple(after - before for before, after in zip(moments, moments[1:], strict=False)),
        decode_seconds=moments[-1] - moments[0] if moments else 0.0,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        error=error,
    )


async def _paced(bodies: Sequence[dict[str, Any]], rate: float | None, seed: int) -> AsyncIterator[dict[str, Any]]:
    draw = random.Random(seed)
    due = time.perf_counter()
    for body in bodies:
        if rate is not None:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += draw.expovariate(rate)
        yield body


def _has_text(event: dict[str, Any]) -> bool:
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls"):
            return True
    return False


def _message(response: httpx.Response) -> str:
    try:
        return str(msgspec.json.decode(response.content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return response.text[:200]
