"""An engine that speaks the real protocol over real sockets and says what a test wrote for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from server.messages import (
    Abort,
    EngineOutputs,
    EngineReady,
    EngineRequest,
    EngineStats,
    FromEngine,
    RequestOutput,
    ResolvedRow,
    Shutdown,
    ToEngine,
    TokenLogprobs,
)

VOCAB_SIZE = 400
STATS = EngineStats(0, 0, 0.0, 0, 0, 0, 0, {})
READY = EngineReady(
    rows=[ResolvedRow("target", "attention", "unset", "torch", "auto")],
    kv_groups=[],
    models=[],
    max_model_len=128,
    kv_bytes=1,
    device="cpu",
    load_seconds=0.1,
    vocab_size=VOCAB_SIZE,
)


def logprobs_of(token_id: int, top: int) -> TokenLogprobs:
    """Made-up log-probabilities: the token that stands there is second, its successor first."""
    others = [(token_id + 1 + i) % 350 for i in range(top)]
    values = [-0.25 - 0.5 * i for i in range(top)]
    if top >= 2:
        others[1], values[1] = token_id, -0.75
    return TokenLogprobs(-0.75, 2, others, values)


@dataclass
class FakeEngine:
    """Gives each request the tokens of `script(request)`, `burst` tokens a step, round robin.

    With `k` every step but a request's first verifies a draft of k tokens, of which all but the last of the step's are
    accepted; a request that wants no drafts gets one token a step.
    """

    link: Path
    script: Callable[[EngineRequest], Sequence[int]]
    burst: int = 1
    k: int = 0
    step_seconds: float = 0.0
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[list[int]] = field(default_factory=list)
    shut_down: bool = False
    running: asyncio.Event = field(default_factory=asyncio.Event)
    cached_tokens: int = 0

    async def start(self, ready: EngineReady | None = READY) -> None:
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        self._push = self._context.socket(zmq.PUSH)
        for socket, name in ((self._pull, "to-engine"), (self._push, "from-engine")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{self.link / name}")
        self.running.set()
        self._active: dict[int, tuple[EngineRequest, list[int], int]] = {}
        self._wake = asyncio.Event()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._work())]
        if ready is not None:
            await self.send(ready)

    async def send(self, message: FromEngine) -> None:
        await self._push.send(msgspec.msgpack.encode(message))

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._context.destroy(linger=0)

    @property
    def open_requests(self) -> int:
        return len(self._active)

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToEngine)
        while True:
            message = decoder.decode(await self._pull.recv())
            if isinstance(message, EngineRequest):
                self.requests.append(message)
                self._active[message.request_id] = (message, list(self.script(message)), 0)
                self._wake.set()
            elif isinstance(message, Abort):
                self.aborted.append(message.request_ids)
                for request_id in message.request_ids:
                    self._active.pop(request_id, None)
            elif isinstance(message, Shutdown):
                self.shut_down = True

    async def _work(self) -> None:
        while True:
            if not self._active:
                self._wake.clear()
                await self._wake.wait()
            await self.running.wait()
            await asyncio.sleep(self.step_seconds)
            outputs = [self._step(request_id) for request_id in list(self._active)]
            if outputs:
                await self.send(EngineOutputs(outputs, STATS))

    def _step(self, request_id: int) -> RequestOutput:
        request, script, done = self._active[request_id]
        params = request.params
        ids: list[int] = []
        finish, stop_id = None, None
        drafts = self.k > 0 and params.most_drafted != 0 and done > 0
        burst = self.burst if drafts or not self.k else 1
        while len(ids) < burst and finish is None:
            position = done + len(ids)
            if position >= params.max_tokens:
                finish = "length"
                break
            token_id = script[position % len(script)]
            ids.append(token_id)
            if token_id in params.stop_token_ids and position + 1 > params.min_tokens:
                finish, stop_id = "stop", token_id
            elif position + 1 == params.max_tokens:
                finish = "length"
        if finish is None:
            self._active[request_id] = (request, script, done + len(ids))
        else:
            del self._active[request_id]
        first = done == 0
        prompt_logprobs = None
        if first and params.prompt_logprobs is not None:
            prompt_logprobs = [None, *(logprobs_of(i, params.prompt_logprobs) for i in request.prompt_token_ids[1:])]
        return RequestOutput(
            request_id,
            ids,
            logprobs=None if params.logprobs is None else [logprobs_of(i, params.logprobs) for i in ids],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            stop_token_id=stop_id,
            cached_tokens=self.cached_tokens if first else 0,
            first_scheduled=request.arrived + 0.0001 if first else 0.0,
            drafted=(self.k if finish is None else len(ids) - 1) if drafts else 0,
            accepted=len(ids) - 1 if drafts else 0,
        )
