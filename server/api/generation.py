"""One client request under way in the engine: all its choices, their metrics, and its end."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field

from server.api.choice import Choice, Delta
from server.api.draft_tally import DraftTally
from server.api.engine_client import EngineClient, EngineUnavailableError
from server.api.errors import unavailable
from server.api.recorder import FinishedSequence, Recorder
from server.messages import EngineRequest, FinishReason, RequestOutput


@dataclass(slots=True)
class SequenceState:
    """A choice with what is measured of it. Times are monotonic seconds, None until they happened."""

    choice: Choice
    request: EngineRequest
    counts_prompt: bool
    """True for one choice of each prompt: a prompt counts once, however many choices continue it."""
    cached_tokens: int = 0
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    started: bool = False
    finish_reason: FinishReason | None = None
    """None while it runs."""


@dataclass(frozen=True)
class Timings:
    """Seconds of the whole request, over its choices: the longest wait and the latest end."""

    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    time_to_first_token_seconds: float | None
    total_seconds: float


@dataclass
class Generation:
    """Submits the sequences when created and hands out deltas as they come.

    Close it when you leave it before its end; what is open is aborted then. Raises `ApiError` 503 when the engine
    cannot take requests.
    """

    engine: EngineClient
    recorder: Recorder
    sequences: Sequence[SequenceState]
    arrived: float
    _open: dict[int, SequenceState] = field(init=False)

    def __post_init__(self) -> None:
        self._open = {sequence.request.request_id: sequence for sequence in self.sequences}
        try:
            self._stream = self.engine.submit(*(sequence.request for sequence in self.sequences))
        except EngineUnavailableError as error:
            raise unavailable(f"{error}.", "engine_dead" if self.engine.status == "dead" else "loading") from None

    @property
    def closed(self) -> bool:
        """Whether `close` ended it before its time."""
        return self._stream.closed

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(s.request.prompt_token_ids) for s in self.sequences if s.counts_prompt)

    @property
    def cached_tokens(self) -> int:
        """Of those, how many the prefix cache held."""
        return sum(s.cached_tokens for s in self.sequences if s.counts_prompt)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(s.choice.completion_tokens for s in self.sequences)

    @property
    def drafts(self) -> DraftTally:
        """What became of the drafts so far."""
        return self._stream.drafts

    @property
    def timings(self) -> Timings:
        """Where the time went so far."""
        finished = [self._measure(s, "stop", time.monotonic()) for s in self.sequences]
        firsts = [s.first_token - self.arrived for s in self.sequences if s.first_token is not None]
        return Timings(
            queue_seconds=_longest(f.queue_seconds for f in finished),
            prefill_seconds=_longest(f.prefill_seconds for f in finished),
            decode_seconds=_longest(f.decode_seconds for f in finished),
            time_to_first_token_seconds=min(firsts, default=None),
            total_seconds=max(f.total_seconds for f in finished),
        )

    def close(self) -> None:
        """Abort what is open; may be called at any time and more than once."""
        self._stream.close()
        now = time.monotonic()
        for sequence in list(self._open.values()):
            self._end(sequence, "abort", now)

    async def deltas(self) -> AsyncGenerator[tuple[SequenceState, Delta]]:
        """What may be sent, in the order in which it came; ends early when closed."""
        async for output in self._stream:
            sequence = self._open.get(output.request_id)
            if sequence is None:
                continue
            delta = self._take(sequence, output, self._stream.received)
            if delta is not None:
                yield sequence, delta

    def _take(self, sequence: SequenceState, output: RequestOutput, now: float) -> Delta | None:
        if not sequence.started:
            sequence.started = True
            sequence.cached_tokens = output.cached_tokens
            sequence.first_scheduled = output.first_scheduled or None
            if sequence.counts_prompt and output.finish_reason != "error":
                self.recorder.prompt_tokens(len(sequence.request.prompt_token_ids))
        choice = sequence.choice
        before = choice.completion_tokens
        delta = choice.feed(output)
        self._record_tokens(sequence, choice.completion_tokens - before, now)
        if choice.finished:
            if output.finish_reason is None:
                self._stream.abort(output.request_id)  # a stop string ended it; the engine does not know
            reason = delta.finish_reason if delta is not None and delta.finish_reason is not None else "stop"
            self._end(sequence, reason, now)
        return delta

    def _end(self, sequence: SequenceState, reason: FinishReason, now: float) -> None:
        del self._open[sequence.request.request_id]
        sequence.finish_reason = reason
        self.recorder.sequence_finished(self._measure(sequence, reason, now))
        if not self._open:
            self.recorder.request_finished(max(s.choice.completion_tokens for s in self.sequences))

    def _record_tokens(self, sequence: SequenceState, count: int, now: float) -> None:
        if count == 0:
            return
        self.recorder.generation_tokens(count)
        if sequence.first_token is None:
            sequence.first_token = sequence.last_token = now
            self.recorder.time_to_first_token(now - self.arrived)
            count -= 1
        if count and sequence.last_token is not None:
            # Tokens that came together share the time since the last ones: one sample per token, and the sum is right.
            self.recorder.token_intervals((now - sequence.last_token) / count, count)
            sequence.last_token = now

    def _measure(self, sequence: SequenceState, reason: FinishReason, now: float) -> FinishedSequence:
        return FinishedSequence(
            finish_reason=reason,
            prompt_tokens=len(sequence.request.prompt_token_ids),
            generation_tokens=sequence.choice.completion_tokens,
            arrived=self.arrived,
            finished=now,
            first_scheduled=sequence.first_scheduled,
            first_token=sequence.first_token,
            last_token=sequence.last_token,
        )


def _longest(seconds: Iterable[float | None]) -> float | None:
    return max((value for value in seconds if value is not None), default=None)
