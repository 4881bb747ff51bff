"""The HTTP app on a scripted engine: everything that a test of it needs, set up and taken down."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from fake_engine import READY, FakeEngine
from fastapi import FastAPI
from tiny_tokenizer import byte_level

from server.api.app import create_app
from server.api.connection import ConnectionLimits
from server.api.context import AppContext, ServedModel, ServingState
from server.api.engine_client import EngineClient
from server.api.http_server import http_server
from server.api.recorder import FinishedSequence
from server.api.template_renderer import TemplateRenderer
from server.checkpoint.tokenizer import TokenizerFiles
from server.listener import listen as open_listener
from server.messages import EngineReady, EngineRequest


@dataclass
class Records:
    """A recorder that keeps what it was told."""

    prompt: int = 0
    generated: int = 0
    first_tokens: list[float] = field(default_factory=list)
    intervals: list[tuple[float, int]] = field(default_factory=list)
    finished: list[FinishedSequence] = field(default_factory=list)
    longest: list[int] = field(default_factory=list)
    rejections: list[str] = field(default_factory=list)
    http: list[tuple[str, str, int]] = field(default_factory=list)

    def prompt_tokens(self, count: int) -> None:
        self.prompt += count

    def generation_tokens(self, count: int) -> None:
        self.generated += count

    def time_to_first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def token_intervals(self, seconds: float, count: int) -> None:
        self.intervals.append((seconds, count))

    def sequence_finished(self, sequence: FinishedSequence) -> None:
        self.finished.append(sequence)

    def request_finished(self, longest: int) -> None:
        self.longest.append(longest)

    def rejected(self, reason: str) -> None:
        self.rejections.append(reason)

    def http_request(self, route: str, method: str, status: int) -> None:
        self.http.append((route, method, status))


@dataclass
class Api:
    """A running app and its surroundings."""

    app: FastAPI
    http: httpx.AsyncClient
    engine: FakeEngine
    link: EngineClient
    state: ServingState
    records: Records
    files: TokenizerFiles

    def encode(self, text: str) -> list[int]:
        return self.files.tokenizer.encode(text, add_special_tokens=False).ids

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, **body: Any) -> dict[str, Any]:
        response = await self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()


@cache
def shared_renderer() -> TemplateRenderer:
    """One for all tests of a run: its processes take a moment to start."""
    return TemplateRenderer()


@contextlib.asynccontextmanager
async def serve_api(
    script: Callable[[EngineRequest], Sequence[int]] | str = "Hello world, hello there!",
    *,
    files: TokenizerFiles | None = None,
    ready: EngineReady | None = READY,
    generation_config: dict[str, Any] | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    **settings: Any,
) -> AsyncIterator[Api]:
    """Run the app on an engine that answers with `script`: token ids by request, or a text, then EOS."""
    files = files or byte_level()
    if isinstance(script, str):
        tokens = [*files.tokenizer.encode(script, add_special_tokens=False).ids, files.eos_token_ids[0]]
        answer: Callable[[EngineRequest], Sequence[int]] = lambda _: tokens  # noqa: E731
    else:
        answer = script
    link_dir = Path(tempfile.mkdtemp(prefix="api-"))
    link = EngineClient(link_dir)
    engine = FakeEngine(link_dir, answer)
    records = Records()
    state = ServingState(
        ServedModel(
            files,
            generation_config or {},
            tool_call_parser=tool_call_parser,
            reasoning_parser=reasoning_parser,
        )
    )
    context = AppContext(
        engine=link,
        recorder=records,
        render_metrics=lambda accept: (b"# metrics for " + accept.encode(), "text/plain; version=0.0.4"),
        state=state,
        **{"served_names": ("tiny",), "version": "0.1.0", "renderer": shared_renderer(), **settings},
    )
    app = create_app(context)
    await link.start()
    await engine.start(ready)
    try:
        async with asyncio.timeout(5):
            while ready is not None and link.status != "ready":
                await asyncio.sleep(0.001)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Api(app, http, engine, link, state, records, files)
    finally:
        await engine.stop()
        await link.close()
        shutil.rmtree(link_dir, ignore_errors=True)


@contextlib.asynccontextmanager
async def listen(api: Api, limits: ConnectionLimits | None = None) -> AsyncIterator[str]:
    """Serve the app on a real port of this machine; yields the base URL."""
    server = http_server(api.app, limits or ConnectionLimits())
    listener = open_listener("127.0.0.1", 0)
    task = asyncio.create_task(server.serve([listener]))
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait until `condition` holds; fail when it never does."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
