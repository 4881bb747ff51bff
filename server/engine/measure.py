"""Times decoding in this process, and sets the time against the floor that memory sets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from msgspec import Struct

from server.config import Settings
from server.engine.floor import measure_bandwidth, model_bytes, step_bytes
from server.engine.in_process import InProcessEngine
from server.messages import DraftCounts, EngineReady
from server.spec.acceptance import acceptance_length, rates, since

SHORT, LONG = 8, 136
"""Tokens of the two runs: their difference leaves out the prompts and what a start costs."""


class DecodeFigures(Struct, frozen=True):
    """Decoding of so many sequences together."""

    batch: int
    ms_per_token: float
    """Of each sequence: (time of 136 tokens - time of 8) / 128, each the best of its runs."""
    tokens_per_second: float
    """Over all sequences."""
    floor_ms: float
    """What reading weights and cache takes at the measured bandwidth, for one token of each sequence."""
    first_tokens_seconds: float
    """All prompts and their first 8 tokens."""
    acceptance_length: float | None
    """Tokens that a step with a draft makes; None without drafts."""
    acceptance_rates: list[float | None]
    """By drafted position."""

    @property
    def share_of_floor(self) -> float:
        """0 to 1."""
        return self.floor_ms / self.ms_per_token


@dataclass(frozen=True)
class Workload:
    """What is measured."""

    batches: Sequence[int]
    prompt_tokens: int
    repeats: int
    seed: int


class DecodeBench:
    """One engine, measured at several batch sizes."""

    def __init__(self, settings: Settings, workload: Workload) -> None:
        """Start the engine and measure the memory's bandwidth.

        Raises:
            UserError: the engine cannot start.
        """
        self.workload = workload
        device = torch.device("cuda") if torch.cuda.is_available() and settings.device != "cpu" else torch.device("cpu")
        self.bandwidth = measure_bandwidth(device)
        """Bytes per second."""
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self._engine = InProcessEngine(settings)
        self._random = random.Random(workload.seed)
        built, block = self._engine.built, self._engine.plan.block_size
        self._target = model_bytes(built.target.model, built.target.block_bytes / block)
        runner = built.draft.runner if built.draft is not None else None
        self._draft = model_bytes(runner.model, runner.block_bytes / block) if runner is not None else None
        self._vocab_size = self._engine.plan.target.layers.vocab_size

    @property
    def ready(self) -> EngineReady:
        """What was built."""
        return self._engine.ready

    def run(self) -> Iterator[DecodeFigures]:
        """One batch size after the other."""
        for batch in self.workload.batches:
            self._run(batch, SHORT)  # what compiles or captures late does it here
            before = self._drafts()
            repeats = range(self.workload.repeats)
            short = min(self._run(batch, SHORT) for _ in repeats)
            long = min(self._run(batch, LONG) for _ in repeats)
            per_token = (long - short) / (LONG - SHORT)
            counts = since(before, self._drafts())
            length = acceptance_length(counts)
            yield DecodeFigures(
                batch=batch,
                ms_per_token=1000 * per_token,
                tokens_per_second=batch / per_token,
                floor_ms=1000 * self._floor(batch, length),
                first_tokens_seconds=short,
                acceptance_length=length,
                acceptance_rates=rates(counts),
            )

    def _floor(self, batch: int, length: float | None) -> float:
        draft = self._engine.plan.draft
        drafted = draft.num_tokens if draft is not None and length is not None else 0
        context = self.workload.prompt_tokens + (SHORT + LONG) / 2
        return step_bytes(self._target, self._draft, batch, drafted, context) / self.bandwidth / (length or 1.0)

    def _drafts(self) -> DraftCounts:
        return self._engine.stats.drafts

    def _run(self, batch: int, tokens: int) -> float:
        draw = self._random.randrange
        prompts = [[draw(self._vocab_size) for _ in range(self.workload.prompt_tokens)] for _ in range(batch)]
        return self._engine.generate(prompts, tokens).seconds
