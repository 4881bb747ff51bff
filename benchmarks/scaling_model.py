"""A step-by-step simulation of replicas behind a balancer: what a load needs, before the machines are there.

A replica works as the engine does: a step computes one row for each sequence that decodes, and prompts in chunks while
the budget of tokens lasts; it takes `base + per_row * rows + per_prompt_token * prompt tokens` seconds. The three are
fitted to a server that was measured (`scaling.py measure`). Arrivals are a Poisson process; lengths are exponential.
Not modelled: preemptions (a sequence waits until its whole answer fits in the KV cache) and prefix hits.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TTFT_OBJECTIVE, TOKEN_OBJECTIVE = 2.5, 0.1
"""Seconds; those of deploy/prometheus/rules.yaml."""


@dataclass(frozen=True)
class Service:
    """One replica. Times are seconds."""

    base: float
    per_row: float
    per_prompt_token: float
    tokens_per_step: float = 1.0
    """Of a decoding sequence: the acceptance length, 1 without drafts."""
    max_num_seqs: int = 128
    max_batched_tokens: int = 1024
    kv_tokens: int = 100_000


@dataclass(frozen=True)
class Load:
    """What comes in. `rate(t)` is requests per second at time t, never above `peak`."""

    rate: Callable[[float], float]
    peak: float
    seconds: float
    prompt_tokens: float
    answer_tokens: float
    exact_lengths: bool = False
    """All alike, to compare with formulas."""


@dataclass
class _Sequence:
    arrived: float
    prompt: int
    left: float
    size: int
    """Tokens of the KV cache that it holds in the end."""


@dataclass
class Replica:
    """One engine: what waits and what runs."""

    service: Service
    waiting: deque[_Sequence] = field(default_factory=deque)
    running: list[_Sequence] = field(default_factory=list)
    held: int = 0
    busy: float = 0.0
    leaving: bool = False
    stepping: bool = False

    @property
    def load(self) -> int:
        """Sequences that run or wait."""
        return len(self.running) + len(self.waiting)

    @property
    def kv_usage(self) -> float:
        """0 to 1."""
        return self.held / self.service.kv_tokens

    def plan(self) -> tuple[float, list[_Sequence], list[_Sequence]]:
        """Duration of the next step, the sequences that decode in it, and those whose prompt it ends."""
        service = self.service
        decoding = [s for s in self.running if s.prompt == 0]
        budget = service.max_batched_tokens - len(decoding)
        computed, first = 0, []
        for sequence in [s for s in self.running if s.prompt]:
            computed += self._prefill(sequence, budget - computed, first)
        while self.waiting and computed < budget and len(self.running) < service.max_num_seqs:
            if self.held + self.waiting[0].size > service.kv_tokens:
                break
            sequence = self.waiting.popleft()
            self.held += sequence.size
            self.running.append(sequence)
            computed += self._prefill(sequence, budget - computed, first)
        rows = len(decoding) + len(first)
        return service.base + service.per_row * rows + service.per_prompt_token * computed, decoding, first

    def _prefill(self, sequence: _Sequence, budget: int, first: list[_Sequence]) -> int:
        chunk = max(0, min(sequence.prompt, budget))
        sequence.prompt -= chunk
        if chunk and sequence.prompt == 0:
            first.append(sequence)
        return chunk


@dataclass
class Outcome:
    """What clients and operators saw."""

    first_tokens: list[float] = field(default_factory=list)
    """Seconds to the first token, by request that got one."""
    waits: list[float] = field(default_factory=list)
    """Seconds to the end of the first step, less that step: time in the queue."""
    tokens: int = 0
    late_tokens: int = 0
    finished: int = 0
    replica_seconds: float = 0.0
    busy_seconds: float = 0.0
    sequence_seconds: float = 0.0
    """Of all sequences, waiting and running, added up."""
    most_replicas: int = 0

    @property
    def late_first_share(self) -> float:
        """Of first tokens that missed their objective."""
        late = sum(seconds > TTFT_OBJECTIVE for seconds in self.first_tokens)
        return late / len(self.first_tokens) if self.first_tokens else 0.0

    @property
    def late_token_share(self) -> float:
        """Of tokens that missed theirs."""
        return self.late_tokens / self.tokens if self.tokens else 0.0

    @property
    def utilisation(self) -> float:
        """Share of the replicas' time in which they worked."""
        return self.busy_seconds / self.replica_seconds if self.replica_seconds else 0.0

    @property
    def in_flight(self) -> float:
        """Sequences that waited or ran on a replica, on average."""
        return self.sequence_seconds / self.replica_seconds if self.replica_seconds else 0.0

    def first_token_quantile(self, share: float) -> float:
        """Seconds."""
        ordered = sorted(self.first_tokens)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


Pick = Callable[[Sequence[Replica], random.Random], Replica]
Scale = Callable[[Sequence[Replica]], int]
"""How many replicas there should be, by what they show now."""


def at_random(replicas: Sequence[Replica], draw: random.Random) -> Replica:
    """As a plain Kubernetes service does."""
    return draw.choice(replicas)


def least_loaded(replicas: Sequence[Replica], draw: random.Random) -> Replica:
    """By running and waiting sequences, as an endpoint picker does that reads both gauges."""
    return min(replicas, key=lambda replica: (replica.load, draw.random()))


def least_waiting(replicas: Sequence[Replica], draw: random.Random) -> Replica:
    """By waiting sequences alone, then by the use of the KV cache."""
    return min(replicas, key=lambda replica: (len(replica.waiting), replica.kv_usage, draw.random()))


@dataclass(frozen=True)
class Autoscaler:
    """Looks every `every` seconds; a new replica is ready `start` seconds after it was asked for."""

    scale: Scale
    every: float = 15.0
    start: float = 60.0
    most: int = 64


def simulate(
    service: Service,
    load: Load,
    replicas: int,
    pick: Pick = least_loaded,
    autoscaler: Autoscaler | None = None,
    seed: int = 0,
) -> Outcome:
    """Run `load` against so many replicas at first."""
    return _Simulation(service, load, replicas, pick, autoscaler, seed).run()


class _Simulation:
    def __init__(
        self, service: Service, load: Load, replicas: int, pick: Pick, autoscaler: Autoscaler | None, seed: int
    ) -> None:
        self._service, self._load, self._pick, self._autoscaler = service, load, pick, autoscaler
        self._draw = random.Random(seed)
        self._replicas = [Replica(service) for _ in range(replicas)]
        self._starting = 0
        self._outcome = Outcome()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0

    def run(self) -> Outcome:
        self._at(self._draw.expovariate(self._load.peak), self._arrive)
        if self._autoscaler is not None:
            self._at(self._autoscaler.every, self._scale)
        then = 0.0
        while self._events:
            now, _, event = heapq.heappop(self._events)
            if now > self._load.seconds:
                break
            self._outcome.replica_seconds += len(self._replicas) * (now - then)
            self._outcome.sequence_seconds += sum(replica.load for replica in self._replicas) * (now - then)
            self._outcome.most_replicas = max(self._outcome.most_replicas, len(self._replicas))
            then = now
            event(now)
        return self._outcome

    def _at(self, when: float, event: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def _arrive(self, now: float) -> None:
        load, draw = self._load, self._draw
        self._at(now + draw.expovariate(load.peak), self._arrive)
        if draw.random() >= load.rate(now) / load.peak:
            return
        prompt, answer = load.prompt_tokens, load.answer_tokens
        if not load.exact_lengths:
            prompt, answer = draw.expovariate(1 / prompt), draw.expovariate(1 / answer)
        whole = max(1, round(prompt)), max(1, round(answer))
        replica = self._pick([replica for replica in self._replicas if not replica.leaving], draw)
        replica.waiting.append(_Sequence(now, whole[0], whole[1], min(sum(whole), self._service.kv_tokens)))
        self._step(replica, now)

    def _step(self, replica: Replica, now: float) -> None:
        if replica.stepping or not replica.load:
            return
        duration, decoding, first = replica.plan()
        replica.stepping = True
        replica.busy += duration
        self._outcome.busy_seconds += duration
        self._at(now + duration, lambda end: self._end(replica, decoding, first, end, duration))

    def _end(
        self, replica: Replica, decoding: list[_Sequence], first: list[_Sequence], now: float, duration: float
    ) -> None:
        outcome = self._outcome
        for sequence in first:
            outcome.first_tokens.append(now - sequence.arrived)
            outcome.waits.append(now - duration - sequence.arrived)
            sequence.left -= 1
        per_step = self._service.tokens_per_step
        for sequence in decoding:
            made = min(per_step, sequence.left)
            sequence.left -= made
            outcome.tokens += 1
            outcome.late_tokens += duration / per_step > TOKEN_OBJECTIVE
        over = [s for s in (*decoding, *first) if s.left <= 0]
        outcome.finished += len(over)
        replica.held -= sum(s.size for s in over)
        replica.running = [s for s in replica.running if s.left > 0]
        replica.stepping = False
        if replica.leaving and not replica.load:
            self._replicas.remove(replica)
        self._step(replica, now)

    def _scale(self, now: float) -> None:
        assert self._autoscaler is not None
        self._at(now + self._autoscaler.every, self._scale)
        staying = [replica for replica in self._replicas if not replica.leaving]
        wanted = max(1, min(self._autoscaler.most, self._autoscaler.scale(staying)))
        for _ in range(wanted - len(staying) - self._starting):
            self._starting += 1
            self._at(now + self._autoscaler.start, self._started)
        for replica in sorted(staying, key=lambda replica: replica.load)[: len(staying) - wanted]:
            replica.leaving = True
            if not replica.load:
                self._replicas.remove(replica)

    def _started(self, _: float) -> None:
        self._starting -= 1
        self._replicas.append(Replica(self._service))
