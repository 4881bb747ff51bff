"""Whether the server may take a request, and the model's text side once it is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from starlette.requests import Request

from server.api.body import has_large_body
from server.api.context import AppContext, ServedModel
from server.api.errors import ApiError, busy, invalid, unavailable
from server.api.generation import Generation, SequenceState
from server.api.grammar_check import GrammarChecker
from server.api.structured import AskedGrammar
from server.api.tokenising import TextCodec
from server.messages import EngineReady, Grammar

_TOKENISING_THREADS = 2
_LARGE_THREADS = 1
MAX_SEQUENCES_PER_REQUEST = 4096

T = TypeVar("T")


class Serving:
    """What all routes share: the context and what is derived from it."""

    def __init__(self, context: AppContext) -> None:
        self.context = context
        self._grammars = GrammarChecker()
        self._executor = ThreadPoolExecutor(_TOKENISING_THREADS, thread_name_prefix="tokenise")
        # Long texts wait for each other, and short ones never for a long one.
        self._large_executor = ThreadPoolExecutor(_LARGE_THREADS, thread_name_prefix="tokenise-large")
        self._codec: tuple[ServedModel, TextCodec] | None = None

    @property
    def model(self) -> ServedModel:
        """The loaded model. Raises `ApiError` 503 before that."""
        model = self.context.state.model
        if model is None:
            raise unavailable("The model is still loading.", "loading")
        return model

    @property
    def codec(self) -> TextCodec:
        """Its tokenizer and templates. Raises `ApiError` 503 before the engine has said its vocabulary's size."""
        model = self.model
        if self._codec is None or self._codec[0] is not model:
            self._codec = (model, TextCodec(model.tokenizer, self.engine_ready.vocab_size, self.context.renderer))
        return self._codec[1]

    async def work(self, request: Request, call: Callable[[], T]) -> T:
        """Run a call that may block, such as a method of the codec, for a request whose body was read."""
        executor = self._large_executor if has_large_body(request) else self._executor
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    def close(self) -> None:
        """Begin nothing more."""
        for executor in (self._executor, self._large_executor):
            executor.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    @property
    def engine_ready(self) -> EngineReady:
        """What the engine said of the model that it built. Raises `ApiError` 503 before that."""
        ready = self.context.engine.ready
        if ready is None:
            raise unavailable("The model is still loading.", "loading")
        return ready

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together. Raises `ApiError` 503 before the engine has said it."""
        return self.engine_ready.max_model_len

    def check_alive(self) -> None:
        """Raise `ApiError` 503 when the engine is dead or has been silent for too long."""
        engine = self.context.engine
        if engine.status == "dead":
            raise unavailable(f"The engine is down: {engine.dead_reason}.", "engine_dead")
        silent = time.monotonic() - engine.last_heard
        if engine.status == "ready" and silent > self.context.engine_timeout:
            raise unavailable(f"The engine has not answered for {silent:.0f} seconds.", "engine_dead")

    def check_ready(self) -> None:
        """Raise `ApiError` 503 unless requests are welcome."""
        self.check_alive()
        if self.context.state.draining:
            raise unavailable("The server is shutting down.", "draining")
        if self.context.engine.status == "loading" or self.context.state.model is None:
            raise unavailable("The model is still loading.", "loading")

    def check_model_name(self, name: str | None) -> str:
        """The name to answer with. Raises `ApiError` 404 for a model that is not served."""
        names = self.context.served_names
        if name is None:
            return names[0]
        if name not in names:
            served = ", ".join(names)
            raise ApiError(
                404,
                f"The model {name[:128]!r} is not served here; there is: {served}.",
                param="model",
                code="model_not_found",
                rejection="invalid",
            )
        return name

    async def check_grammar(self, asked: AskedGrammar | None) -> Grammar | None:
        """What the answer is bound to. Raises `ApiError` 400 that names the field when it cannot be compiled."""
        return await self._grammars.check(asked, self.codec.special_tokens)

    def admit(self, sequences: int) -> None:
        """Raise `ApiError` 429 when the queue is full, 400 when it could never hold so many sequences."""
        context = self.context
        capacity = MAX_SEQUENCES_PER_REQUEST
        if context.max_queued_requests is not None:
            capacity = context.max_num_seqs + context.max_queued_requests
        if sequences > min(capacity, MAX_SEQUENCES_PER_REQUEST):
            raise invalid(
                f"The request asks for {sequences} sequences (prompts times n), but at most "
                f"{min(capacity, MAX_SEQUENCES_PER_REQUEST)} are possible in one request.",
                param="n",
            )
        if context.max_queued_requests is not None and context.engine.open_sequences + sequences > capacity:
            raise busy(f"The queue is full: {context.engine.open_sequences} sequences are running or waiting.")

    def begin(self, sequences: Sequence[SequenceState], arrived: float) -> Generation:
        """Send the sequences to the engine. Raises `ApiError` 429 when the queue is full, 503 when it is gone."""
        self.check_ready()
        self.admit(len(sequences))
        queued, most = self.context.engine.queued_tokens, self.context.max_queued_tokens
        # An empty queue takes a prompt of any length, so that none is refused for ever.
        if most is not None and queued and queued + sum(len(s.request.prompt_token_ids) for s in sequences) > most:
            raise busy(f"The queue is full: prompts of {queued} tokens wait, and it takes {most}.")
        return Generation(self.context.engine, self.context.recorder, sequences, arrived)
