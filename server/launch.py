"""The life of the API process, from an open port to the exit code.

start    HTTP answers at once (/health 200, /ready 503), the metrics are there, all at 0
load     find the checkpoint, start the engine process, load the tokenizer beside it
serve    until the engine dies, or someone asks for the end
drain    /ready and new POSTs 503, open requests finish or run into --drain-timeout
end      the engine is told to leave, or killed; no process and no file stays behind
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop
from rich.console import Console
from starlette.types import ASGIApp

from server.activity import ActivityLog
from server.api.app import create_app
from server.api.connection import ConnectionLimits
from server.api.context import AppContext, ServingState
from server.api.engine_client import EngineClient
from server.api.http_server import HTTPServer, http_server
from server.api.template_renderer import TemplateRenderer
from server.background import in_thread
from server.checkpoint.locate import locate
from server.config import Settings
from server.engine_process import ENGINE_COMMAND, EngineProcess, describe_exit
from server.errors import UserError
from server.link_folder import link_folder
from server.listener import url_of
from server.messages import EngineFailed, EngineReady, EngineStats
from server.metrics.recorder import Metrics
from server.served_model import DEFAULT_MODEL_NAME, check_chat_templates, default_name, served_model
from server.startup import StartupDisplay
from server.startup_log import StartupLog
from server.tls import tls_context
from server.tracing.start import Traced, traced

_log = logging.getLogger("server.launch")

LAST_WORDS = 0.7
"""Seconds in which clients and probes may learn of a dead engine, or of the end, before the sockets close."""
TRACES_PATIENCE = 2.0
"""Seconds that the last spans get to be sent."""
ENGINE_PATIENCE = 2.0
"""Seconds that an engine gets to leave by itself."""


def serve(
    settings: Settings, listener: socket.socket, console: Console, engine_command: Sequence[str] = ENGINE_COMMAND
) -> int:
    """Serve on `listener` until told to stop, and return the exit code.

    Args:
        settings: the resolved tree.
        listener: a listening socket; closed at the end.
        console: where the start is shown.
        engine_command: starts the engine; it gets --config-file and --link.

    Raises:
        UserError: the start failed for a reason that the user can act on.
    """
    with listener, link_folder() as folder:
        return uvloop.run(_Server(settings, listener, console, engine_command, folder).live())


class _Server:
    """One server, lived once."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        console: Console,
        engine_command: Sequence[str],
        folder: Path,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._url = url_of(listener, tls=settings.ssl_certfile is not None)
        self._engine_command = engine_command
        self._folder = folder
        self._model_name = settings.served_model_name or default_name(settings.model)
        self._display = StartupLog() if settings.log_format == "json" else StartupDisplay(console)
        self._metrics = Metrics(self._model_name, settings.metrics_names)
        self._metrics.started(version("outrider"), time.time())
        self._activity = ActivityLog(self._metrics.speculation.watchdog)
        self._state = ServingState()
        self._renderer = TemplateRenderer()
        self._engine_ready = asyncio.Event()
        self._engine_failed: EngineFailed | None = None
        self._stop = asyncio.Event()
        self._client = EngineClient(
            folder,
            on_progress=lambda progress: self._display.progress(progress.stage, progress.done, progress.total),
            on_ready=self._on_ready,
            on_failed=self._on_failed,
            on_stats=self._on_stats,
        )
        self._starting: asyncio.Task[EngineProcess] | None = None
        self._engine: EngineProcess | None = None
        self._ending = False
        self._traced: Traced | None = None
        self._http = self._make_http()

    async def live(self) -> int:
        """The whole life, in order.

        Raises:
            UserError: the start failed for a reason that the user can act on.
        """
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, self._on_signal)
        await self._client.start()
        answering = asyncio.create_task(self._http.serve([self._listener]), name="http")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        loading = asyncio.create_task(self._load(), name="load")
        try:
            await _first(loading, stop, answering)
            if loading.done():
                engine = loading.result()  # raises what made the start fail
                await _first(engine.exit, stop, answering)
            if stop.done():
                return await self._drain()
            await asyncio.sleep(LAST_WORDS)  # the engine died: whoever waits, and every probe, is told so
            return 1
        finally:
            loading.cancel()
            await self._end(answering)

    async def _load(self) -> EngineProcess:
        """Find the model, start the engine, load the tokenizer meanwhile; return when both are ready.

        Raises:
            UserError: one of them cannot be had as asked, or the engine died.
        """
        settings = self._settings
        self._display.begin(settings.model or DEFAULT_MODEL_NAME, self._url, settings)
        download_dir = Path(settings.download_dir) if settings.download_dir else None
        checkpoint = await in_thread(lambda: locate(settings.model, download_dir=download_dir))
        self._display.found(checkpoint.source, str(checkpoint.path))
        engine = await self._start_engine(settings.model_copy(update={"model": str(checkpoint.path)}))
        self._state.model = model = await in_thread(lambda: served_model(settings, checkpoint))
        await in_thread(lambda: check_chat_templates(settings, model, self._renderer))
        ready = asyncio.create_task(self._engine_ready.wait())
        await _first(engine.exit, ready)
        if engine.exit.done() or self._client.ready is None:
            raise UserError(await self._why_the_start_failed(engine.exit.result()))
        defaults = {k: v for k, v in asdict(model.defaults).items() if model.generation_config.get(k) is not None}
        keyed = bool(settings.api_key)
        self._display.formats(model.formats.describe())
        self._display.ready(self._client.ready, self._url, self._model_name, defaults, keyed=keyed)
        return engine

    async def _start_engine(self, settings: Settings) -> EngineProcess:
        """Start it so that a cancelled load cannot lose sight of it."""
        self._starting = asyncio.create_task(EngineProcess.start(self._engine_command, settings, self._folder))
        self._engine = engine = await asyncio.shield(self._starting)
        engine.exit.add_done_callback(self._on_engine_exit)
        return engine

    async def _why_the_start_failed(self, code: int) -> str:
        for _ in range(10):  # the last message may still be on its way
            if self._engine_failed is not None:
                return self._engine_failed.message
            await asyncio.sleep(0.02)
        return f"the engine process died while it was loading the model ({describe_exit(code)})"

    async def _drain(self) -> int:
        """Take nothing new and let open requests finish; those that do not in time end with an error."""
        self._state.draining = True
        deadline = time.monotonic() + self._settings.drain_timeout
        if self._client.open_sequences:
            _log.info("draining: %d sequences are open", self._client.open_sequences)
        while self._is_answering() and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._client.open_sequences:
            _log.warning("%d sequences did not finish within --drain-timeout", self._client.open_sequences)
            self._client.mark_dead("the server is shutting down")
        return 1 if self._engine is not None and self._engine.exit.done() else 0

    def _is_answering(self) -> bool:
        return bool(self._client.open_sequences or self._http.server_state.tasks)

    async def _end(self, answering: asyncio.Task[None]) -> None:
        """Close the sockets, the engine and the link, in this order."""
        self._ending = True
        self._display.stop()
        self._http.should_exit = True
        await asyncio.wait([answering])
        if self._starting is not None:
            engine = await self._starting
            self._client.shutdown()
            # While it loads it reads no message, and has nothing to lose.
            await engine.end(ENGINE_PATIENCE if self._engine_ready.is_set() else 0)
        await self._client.close()
        await in_thread(self._renderer.close)
        if self._traced is not None:
            with contextlib.suppress(TimeoutError):  # a collector that does not answer holds nobody up
                await asyncio.wait_for(in_thread(self._traced.close), TRACES_PATIENCE)

    def _on_engine_exit(self, exit_: asyncio.Task[int]) -> None:
        if not self._ending:
            if self._engine_ready.is_set():
                _log.error("the engine process died (%s)", describe_exit(exit_.result()))
            self._client.mark_dead("the engine process died")
            self._metrics.engine_lost()

    def _on_ready(self, ready: EngineReady) -> None:
        self._metrics.engine_ready(ready)
        self._activity.ready(ready.speculative)
        self._engine_ready.set()

    def _on_stats(self, stats: EngineStats) -> None:
        self._metrics.engine_stats(stats)
        self._activity.observe(stats, self._metrics.generated, time.monotonic())

    def _on_failed(self, failed: EngineFailed) -> None:
        self._engine_failed = failed

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
            return
        # The second time means now: nothing is waited for, and nothing is left behind.
        self._display.stop()
        if self._engine is not None:
            self._engine.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(1)

    def _render_metrics(self, accept: str) -> tuple[bytes, str]:
        silent = time.monotonic() - self._client.last_heard
        self._metrics.engine_up(self._client.status == "ready" and silent < self._settings.engine_timeout)
        return self._metrics.render(accept)

    def _make_http(self) -> HTTPServer:
        settings = self._settings
        context = AppContext(
            engine=self._client,
            recorder=self._metrics,
            render_metrics=self._render_metrics,
            state=self._state,
            served_names=(self._model_name,),
            version=version("outrider"),
            api_keys=settings.api_key,
            max_num_seqs=settings.max_num_seqs,
            max_queued_requests=settings.max_queued_requests,
            max_queued_tokens=settings.max_queued_tokens,
            max_inflight_per_key=settings.max_inflight_per_key,
            priority_scheduling=settings.scheduling_policy == "priority",
            engine_timeout=settings.engine_timeout,
            sse_keep_alive=settings.sse_keep_alive,
            allowed_origins=settings.allowed_origins,
            playground=settings.playground,
            root_path=settings.root_path,
            renderer=self._renderer,
        )
        limits = ConnectionLimits(send_seconds=settings.send_timeout)
        app: ASGIApp = create_app(context)
        if settings.otlp_traces_endpoint is not None:
            self._traced = traced(app, settings.otlp_traces_endpoint, self._model_name, context.version)
            app = self._traced.app
        return http_server(app, limits, tls_context(settings))


async def _first(*tasks: asyncio.Task[Any]) -> None:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
