"""Delivering a generation, whole or as a stream, in the format of its endpoint."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from server.api.choice import Delta
from server.api.errors import ApiError, unavailable
from server.api.generation import Generation, SequenceState
from server.api.responses import MetricsBody, PromptTokensDetails, SpeculativeDecodingBody, TimingsBody, Usage
from server.api.schemas.load import GenerateRequest, Own
from server.api.schemas.sampling import DeliveryFields
from server.api.serving import Serving
from server.api.streaming import DONE, EventEncoder, EventStream, error_event, on_disconnect

_QUICK_TOKENS = 1000
"""Tokens up to which an answer is written on the event loop: with 20 log-probabilities each it takes 8 ms."""


@dataclass(frozen=True)
class AnswerHead:
    """What stands at the top of every answer and chunk."""

    prefix: str
    """Of the id: "cmpl" or "chatcmpl"."""
    model: str
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id", f"{self.prefix}-{uuid.uuid4().hex}")
        object.__setattr__(self, "created", int(time.time()))


class AnswerFormat(Protocol):
    """How one endpoint writes its answers."""

    def whole(
        self,
        choices: list[tuple[SequenceState, Delta]],
        usage: Usage,
        metrics: MetricsBody | UnsetType,
    ) -> msgspec.Struct:
        """The answer as one object; each delta is all of its choice."""
        ...

    def chunks(
        self,
        sequence: SequenceState,
        delta: Delta,
        first: bool,
        usage: Usage | None | UnsetType,
        metrics: MetricsBody | UnsetType,
    ) -> list[msgspec.Struct]:
        """The chunks of one delta; `first` for the first one of a choice."""
        ...

    def last_chunk(self, usage: Usage, metrics: MetricsBody | UnsetType) -> msgspec.Struct:
        """The chunk without choices that carries the usage."""
        ...


async def deliver(
    request: Request, serving: Serving, generation: Generation, style: AnswerFormat, asked: GenerateRequest[Own]
) -> Response:
    """Answer as the request asked. Raises `ApiError` (500, 503) and `ClientDisconnect`."""
    request.state.generation = generation  # for the trace of the request
    delivery, headers = asked.delivery, asked.headers
    if delivery.stream:
        events = _events(generation, style, delivery)
        return EventStream(events, generation.close, serving.context.sse_keep_alive, headers)
    try:
        choices = await _collect(request, generation)
    finally:
        generation.close()
    usage, metrics = _usage(generation, generation.completion_tokens), _metrics(generation, delivery)

    def encode() -> bytes:
        return msgspec.json.encode(style.whole(choices, usage, metrics))

    tokens = sum(len(delta.tokens) + len(delta.prompt_logprobs or ()) for _, delta in choices)
    content = encode() if tokens <= _QUICK_TOKENS else await asyncio.to_thread(encode)
    return Response(content, 200, headers, "application/json")


async def _collect(request: Request, generation: Generation) -> list[tuple[SequenceState, Delta]]:
    pieces: dict[int, list[Delta]] = {sequence.choice.index: [] for sequence in generation.sequences}
    async with on_disconnect(request.receive, generation.close), contextlib.aclosing(generation.deltas()) as deltas:
        async for sequence, delta in deltas:
            _raise_for_error(generation, delta)
            pieces[sequence.choice.index].append(delta)
    if generation.closed:
        raise ClientDisconnect
    return [(sequence, _joined(pieces[sequence.choice.index])) for sequence in generation.sequences]


async def _events(generation: Generation, style: AnswerFormat, delivery: DeliveryFields) -> AsyncGenerator[bytes]:
    encode = EventEncoder()
    options = delivery.stream_options
    include_usage = bool(options and options.include_usage)
    continuous = include_usage and bool(options and options.continuous_usage_stats)
    usage: Usage | None | UnsetType = None if include_usage else UNSET
    begun: set[int] = set()
    unfinished = len(generation.sequences)
    async with contextlib.aclosing(generation.deltas()) as deltas:
        async for sequence, delta in deltas:
            try:
                _raise_for_error(generation, delta)
            except ApiError as error:
                yield error_event(error.body())
                yield DONE
                return
            index = sequence.choice.index
            unfinished -= delta.finish_reason is not None
            if continuous:
                usage = _usage(generation, sum(s.choice.released_tokens for s in generation.sequences))
            with_metrics = not include_usage and not unfinished
            metrics = _metrics(generation, delivery) if with_metrics else UNSET
            for chunk in style.chunks(sequence, delta, index not in begun, usage, metrics):
                yield encode(chunk)
            begun.add(index)
    if generation.closed:
        return
    if include_usage:
        yield encode(style.last_chunk(_usage(generation, generation.completion_tokens), _metrics(generation, delivery)))
    yield DONE


def _raise_for_error(generation: Generation, delta: Delta) -> None:
    if delta.finish_reason != "error":
        return
    message = (delta.error or "the engine failed").removesuffix(".")
    if delta.request_at_fault:
        raise ApiError(400, f"The answer cannot go on: {message}.", code="invalid_value")
    if generation.engine.status == "dead":
        raise unavailable(f"The request was cut short: {message}.", "engine_dead")
    raise ApiError(500, f"The request was cut short: {message}.", code="engine_error")


def _joined(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    prompt_logprobs = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    return Delta(
        text="".join([delta.text for delta in deltas]),
        tokens=[token for delta in deltas for token in delta.tokens],
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
    )


def _usage(generation: Generation, completion_tokens: int) -> Usage:
    prompt_tokens = generation.prompt_tokens
    details = PromptTokensDetails(generation.cached_tokens)
    return Usage(prompt_tokens, completion_tokens, prompt_tokens + completion_tokens, details)


def _metrics(generation: Generation, delivery: DeliveryFields) -> MetricsBody | UnsetType:
    if not delivery.metrics:
        return UNSET
    t = generation.timings
    timings = TimingsBody(
        t.queue_seconds, t.prefill_seconds, t.decode_seconds, t.time_to_first_token_seconds, t.total_seconds
    )
    return MetricsBody(timings, _speculative_decoding(generation))


def _speculative_decoding(generation: Generation) -> SpeculativeDecodingBody | None:
    ready = generation.engine.ready
    if ready is None or ready.speculative is None:
        return None
    drafts, k = generation.drafts, ready.speculative.num_speculative_tokens
    steps = drafts.steps
    return SpeculativeDecodingBody(
        mean_acceptance_length=1 + drafts.accepted / steps if steps else None,
        draft_acceptance_rate=drafts.accepted / drafts.drafted if steps else None,
        acceptance_histogram=drafts.lengths + [0] * (k + 1 - len(drafts.lengths)),
        num_spec_steps=steps,
        num_accepted_draft_tokens=drafts.accepted,
        num_draft_tokens=drafts.drafted,
        num_spec_tokens=k,
    )
