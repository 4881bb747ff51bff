"""An engine in this very process, for measurements and tests: requests in, tokens out, no sockets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from server.config import Settings
from server.engine.start import start_engine
from server.errors import UserError
from server.messages import (
    EngineOutputs,
    EngineReady,
    EngineRequest,
    EngineStats,
    FromEngine,
    RequestOutput,
    SamplingParams,
    ToEngine,
)


@dataclass
class DirectLink:
    """Both ends of a link at once: what the engine is to receive, and what it has sent."""

    inbox: list[ToEngine] = field(default_factory=list)
    ready: EngineReady | None = None
    stats: EngineStats | None = None
    outputs: dict[int, list[RequestOutput]] = field(default_factory=dict)
    """Of live and ended requests, in the order they came."""
    ended: dict[int, str] = field(default_factory=dict)
    """Why requests ended; for one that failed, the message."""

    def send(self, message: FromEngine) -> None:
        """Take note of what the engine says."""
        match message:
            case EngineReady():
                self.ready = message
            case EngineOutputs(outputs, stats):
                self.stats = stats
                for output in outputs:
                    self.outputs.setdefault(output.request_id, []).append(output)
                    if output.finish_reason is not None:
                        self.ended[output.request_id] = output.error or output.finish_reason

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        """Whatever waits; never sleeps."""
        messages, self.inbox = self.inbox, []
        return messages


@dataclass(frozen=True)
class Answers:
    """What came of requests that were sent together."""

    outputs: list[list[RequestOutput]]
    seconds: float
    """From handing the requests over to the last one's end."""

    @property
    def token_ids(self) -> list[list[int]]:
        """Each request's answer."""
        return [[token for output in outputs for token in output.token_ids] for outputs in self.outputs]


class InProcessEngine:
    """Builds an engine like `outrider serve` does, and runs its loop on demand."""

    def __init__(self, settings: Settings) -> None:
        """Start it.

        Raises:
            UserError: see `start_engine`.
        """
        self.link = DirectLink()
        started = start_engine(settings, self.link)
        self.core, self.plan, self.built = started.core, started.plan, started.built
        self._ids = itertools.count(1)

    @property
    def ready(self) -> EngineReady:
        """What was built."""
        assert self.link.ready is not None
        return self.link.ready

    @property
    def stats(self) -> EngineStats:
        """Totals after the last step."""
        assert self.link.stats is not None
        return self.link.stats

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, first_seed: int = 0, **params: Any
    ) -> Answers:
        """Continue prompts together, greedily unless `params` (fields of SamplingParams) say otherwise.

        A prompt's seed is `first_seed` plus its place: acceptance drawn by lot is then the same in every run.

        Raises:
            UserError: the engine could not run one of them.
        """
        started = time.perf_counter()
        ids = [next(self._ids) for _ in prompts]
        for seed, (request_id, prompt) in enumerate(zip(ids, prompts, strict=True), first_seed):
            sampling = SamplingParams(**{"max_tokens": max_tokens, "seed": seed, "temperature": 0.0} | params)
            self.link.inbox.append(EngineRequest(request_id, list(prompt), sampling, arrived=float(request_id)))
        while len(self.link.ended) < len(ids):
            self.core.round()
        seconds = time.perf_counter() - started
        ended, self.link.ended = self.link.ended, {}
        outputs, self.link.outputs = self.link.outputs, {}
        failed = [reason for reason in ended.values() if reason not in ("stop", "length")]
        if failed:
            raise UserError(f"{len(failed)} of {len(ids)} requests failed: {failed[0]}")
        return Answers([outputs.get(request_id, []) for request_id in ids], seconds)
