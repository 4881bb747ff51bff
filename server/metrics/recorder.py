"""Takes in what the HTTP side and the engine report, and renders /metrics from it.

Everything here runs on the API process's event loop and touches only this process's memory.
"""

from __future__ import annotations

from typing import Literal, Protocol

from prometheus_client import Counter, Gauge, Histogram

from server.messages import EngineReady, EngineStats, FinishReason
from server.metrics import names
from server.metrics.exposition import Exposition, Instrument, Names, instrument
from server.metrics.names import Metric

RejectionReason = Literal["queue_full", "loading", "draining", "engine_dead", "invalid", "unauthorized"]


class FinishedSequence(Protocol):
    """One sequence that has ended. Times are seconds; None for what it did not reach."""

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""

    @property
    def prompt_tokens(self) -> int:
        """Of its prompt."""

    @property
    def generation_tokens(self) -> int:
        """Delivered to the client."""

    @property
    def total_seconds(self) -> float:
        """From the request's arrival to the end."""

    @property
    def queue_seconds(self) -> float | None:
        """From the arrival to the first step."""

    @property
    def prefill_seconds(self) -> float | None:
        """From the first step to the first token."""

    @property
    def decode_seconds(self) -> float | None:
        """From the first token to the last."""


class Metrics:
    """All metrics of one server.

    Args:
        model_name: the served name, the label that all series carry.
        shown: under which names they are rendered.
    """

    def __init__(self, model_name: str, shown: Names) -> None:
        self._model_name = model_name
        self._instruments: dict[str, Instrument] = {metric.name: instrument(metric) for metric in names.ALL}
        self._exposition = Exposition(shown, [(metric, self._instruments[metric.name]) for metric in names.ALL])
        self._stats: EngineStats | None = None
        for metric in names.ALL:
            for values in metric.values:
                self._instruments[metric.name].labels(model_name, *values)
        self._running = self._gauge(names.REQUESTS_RUNNING)
        self._waiting = self._gauge(names.REQUESTS_WAITING)
        self._kv_usage = self._gauge(names.KV_CACHE_USAGE)
        self._engine_up = self._gauge(names.ENGINE_UP)
        self._prompt_tokens = self._counter(names.PROMPT_TOKENS)
        self._generation_tokens = self._counter(names.GENERATION_TOKENS)
        self._preemptions = self._counter(names.PREEMPTIONS)
        self._prefix_queries = self._counter(names.PREFIX_CACHE_QUERIES)
        self._prefix_hits = self._counter(names.PREFIX_CACHE_HITS)
        self._first_token = self._histogram(names.TIME_TO_FIRST_TOKEN)
        self._inter_token = self._histogram(names.INTER_TOKEN)
        self._per_token = self._histogram(names.TIME_PER_OUTPUT_TOKEN)
        self._request = self._histogram(names.REQUEST_SECONDS)
        self._queue = self._histogram(names.REQUEST_QUEUE_SECONDS)
        self._prefill = self._histogram(names.REQUEST_PREFILL_SECONDS)
        self._decode = self._histogram(names.REQUEST_DECODE_SECONDS)
        self._request_prompt = self._histogram(names.REQUEST_PROMPT_TOKENS)
        self._request_generation = self._histogram(names.REQUEST_GENERATION_TOKENS)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body of /metrics and its content type, for a request's Accept header."""
        return self._exposition.render(accept)

    def prompt_tokens(self, count: int) -> None:
        """Count a prompt that the engine has read."""
        self._prompt_tokens.inc(count)

    def generation_tokens(self, count: int) -> None:
        """Count tokens delivered to a client."""
        self._generation_tokens.inc(count)

    def time_to_first_token(self, seconds: float) -> None:
        """Note how long one sequence's first token took."""
        self._first_token.observe(seconds)

    def token_intervals(self, seconds: float, count: int) -> None:
        """Note `count` tokens that came `seconds` apart."""
        for _ in range(count):
            self._inter_token.observe(seconds)

    def sequence_finished(self, sequence: FinishedSequence) -> None:
        """Note the times and lengths of a sequence that has ended."""
        self._counter(names.REQUESTS, sequence.finish_reason).inc()
        self._request.observe(sequence.total_seconds)
        self._request_prompt.observe(sequence.prompt_tokens)
        self._request_generation.observe(sequence.generation_tokens)
        for histogram, seconds in (
            (self._queue, sequence.queue_seconds),
            (self._prefill, sequence.prefill_seconds),
            (self._decode, sequence.decode_seconds),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if sequence.decode_seconds is not None and sequence.generation_tokens > 1:
            self._per_token.observe(sequence.decode_seconds / (sequence.generation_tokens - 1))

    def rejected(self, reason: RejectionReason) -> None:
        """Count a request that was refused."""
        self._counter(names.REJECTED_REQUESTS, reason).inc()

    def http_request(self, route: str, method: str, status: int) -> None:
        """Count an HTTP answer; `route` and `method` must come from a bounded set."""
        self._counter(names.HTTP_REQUESTS, route, method, str(status)).inc()

    def engine_up(self, is_up: bool) -> None:
        """Show whether the engine is there and answering."""
        self._engine_up.set(is_up)

    def engine_ready(self, ready: EngineReady) -> None:
        """Show what the engine built, as it read it back."""
        for row in ready.rows:
            self._gauge(names.BACKEND_INFO, row.role, row.component, row.requested, row.resolved, row.source).set(1)
        for group in ready.kv_groups:
            sizes = (group.group, group.block_size, group.kernel_page_size, group.num_blocks, group.layers)
            self._gauge(names.KV_GROUP_INFO, *map(str, sizes)).set(1)
        for group in ready.kv_groups[:1]:  # a picker reads one series: the first group is the target's
            self._gauge(names.CACHE_CONFIG_INFO, "0", str(group.block_size), str(group.num_blocks)).set(1)
        for model in ready.models:
            loaded = (model.role, model.architecture, str(model.parameters), model.path_hash, model.method)
            self._gauge(names.MODEL_INFO, *loaded).set(1)

    def engine_stats(self, stats: EngineStats) -> None:
        """Take over a snapshot of the engine."""
        before = self._stats
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._kv_usage.set(stats.kv_usage)
        self._preemptions.inc(stats.preemptions - (before.preemptions if before else 0))
        self._prefix_queries.inc(stats.prefix_queries - (before.prefix_queries if before else 0))
        self._prefix_hits.inc(stats.prefix_hits - (before.prefix_hits if before else 0))
        for phase, durations in stats.phase_seconds.items():
            histogram = self._histogram(names.STEP_SECONDS_BY_PHASE, phase)
            for seconds in durations:
                histogram.observe(seconds)
        self._stats = stats

    def engine_lost(self) -> None:
        """The engine is dead: nothing runs or waits any more."""
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.set(0)

    def _gauge(self, metric: Metric, *values: str) -> Gauge:
        child = self._instruments[metric.name].labels(self._model_name, *values)
        if not isinstance(child, Gauge):
            raise TypeError(f"{metric.name} is no gauge")
        return child

    def _counter(self, metric: Metric, *values: str) -> Counter:
        child = self._instruments[metric.name].labels(self._model_name, *values)
        if not isinstance(child, Counter):
            raise TypeError(f"{metric.name} is no counter")
        return child

    def _histogram(self, metric: Metric, *values: str) -> Histogram:
        child = self._instruments[metric.name].labels(self._model_name, *values)
        if not isinstance(child, Histogram):
            raise TypeError(f"{metric.name} is no histogram")
        return child
