"""The API side of the link to the engine process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from server.api.request_stream import RequestStream
from server.messages import (
    Abort,
    EngineFailed,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    EngineStats,
    FromEngine,
    Progress,
    RequestOutput,
    Shutdown,
    ToEngine,
)

_log = logging.getLogger(__name__)

EngineStatus = Literal["loading", "ready", "dead"]


class EngineUnavailableError(Exception):
    """The engine cannot take a request now. The message is for the user."""


def _nothing(_: object) -> None:
    """Stand in for a callback that nobody gave."""


class EngineClient:
    """Sends requests to the engine process and hands its outputs to the streams that wait for them.

    Lives on one event loop. The sockets are `to-engine` and `from-engine` in `link_dir`, which must be private to the
    user. The callbacks are called on the loop and must be quick.
    """

    def __init__(
        self,
        link_dir: Path,
        *,
        on_progress: Callable[[Progress], None] = _nothing,
        on_ready: Callable[[EngineReady], None] = _nothing,
        on_failed: Callable[[EngineFailed], None] = _nothing,
        on_stats: Callable[[EngineStats], None] = _nothing,
    ) -> None:
        self._link_dir = link_dir
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._on_stats = on_stats
        self._context: zmq.asyncio.Context | None = None
        self._push: zmq.Socket[bytes] | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._streams: dict[int, RequestStream] = {}
        self._queued: dict[int, int] = {}  # prompt tokens of the sequences without an output yet
        self._ids = count(1)
        self.status: EngineStatus = "loading"
        self.dead_reason = ""
        self.ready: EngineReady | None = None
        self.stats: EngineStats | None = None
        self.last_heard = time.monotonic()

    async def start(self) -> None:
        """Bind both sockets and listen. Raises `zmq.ZMQError` when the folder cannot hold sockets."""
        self._context = zmq.asyncio.Context()
        # A plain socket to send with: with no high-water mark a send never waits, so submitting needs no task.
        self._push = zmq.Socket(self._context, zmq.PUSH)
        pull = self._context.socket(zmq.PULL)
        for socket, name in ((self._push, "to-engine"), (pull, "from-engine")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.set_hwm(0)
            socket.bind(f"ipc://{self._link_dir / name}")
        self.last_heard = time.monotonic()
        self._receiver = asyncio.create_task(self._receive(pull), name="engine-outputs")

    async def close(self) -> None:
        """Stop listening and close the sockets; open streams end with an error."""
        self.mark_dead("the server is shutting down")
        if self._receiver is not None:
            self._receiver.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._receiver
            self._receiver = None
        if self._push is not None:
            self._push.close()
            self._push = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def next_request_id(self) -> int:
        """A request id that was never given out before."""
        return next(self._ids)

    @property
    def open_sequences(self) -> int:
        """How many sequences the engine still works on, waiting ones included."""
        return len(self._streams)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of the sequences that wait for their first token."""
        return sum(self._queued.values())

    def submit(self, *requests: EngineRequest) -> RequestStream:
        """Send the sequences of one client request; the stream yields the outputs of all of them.

        Close the stream when you leave it before its end: what is open is aborted then.
        Raises `EngineUnavailableError` when the engine is loading or dead.
        """
        if self.status != "ready":
            raise EngineUnavailableError(self.dead_reason or "the model is still loading")
        stream = RequestStream((request.request_id for request in requests), self._release)
        for request in requests:
            self._streams[request.request_id] = stream
            self._queued[request.request_id] = len(request.prompt_token_ids)
        try:
            for request in requests:
                self._send(request)
        except zmq.Again:
            self.mark_dead("the engine is gone")
            raise EngineUnavailableError(self.dead_reason) from None
        return stream

    def shutdown(self) -> None:
        """Ask the engine to leave its loop and exit; does nothing when it is not there."""
        with contextlib.suppress(zmq.Again):
            self._send(Shutdown())

    def mark_dead(self, reason: str) -> None:
        """End every open stream with an error output; later submits raise. The first reason stays."""
        if self.status == "dead":
            return
        self.status = "dead"
        self.dead_reason = reason
        now = time.monotonic()
        for request_id, stream in list(self._streams.items()):
            stream.put(RequestOutput(request_id, [], finish_reason="error", error=reason), now)
        self._streams.clear()
        self._queued.clear()

    def _release(self, request_ids: list[int], abort: bool) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)
            self._queued.pop(request_id, None)
        if abort and self.status == "ready":
            with contextlib.suppress(zmq.Again):  # a vanished engine has nothing to abort
                self._send(Abort(request_ids))

    def _send(self, message: ToEngine) -> None:
        if self._push is not None:
            self._push.send(self._encoder.encode(message), zmq.NOBLOCK)

    async def _receive(self, pull: zmq.asyncio.Socket) -> None:
        try:
            while True:
                frame = await pull.recv()
                self.last_heard = time.monotonic()
                self._dispatch(self._decoder.decode(frame))
        except Exception:
            # Nobody awaits this task while the server runs, and without it every request would hang.
            _log.exception("reading from the engine failed")
            self.mark_dead("the link to the engine broke")
        finally:
            pull.close()

    def _dispatch(self, message: FromEngine) -> None:
        if isinstance(message, EngineOutputs):
            for output in message.outputs:
                self._queued.pop(output.request_id, None)
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    stream.put(output, self.last_heard)
            self.stats = message.stats
            self._on_stats(message.stats)
        elif isinstance(message, Progress):
            self._on_progress(message)
        elif isinstance(message, EngineReady):
            self.ready = message
            if self.status == "loading":
                self.status = "ready"
            self._on_ready(message)
        else:
            self._on_failed(message)
            self.mark_dead(message.message)
