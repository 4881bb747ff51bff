"""Takes in what the HTTP side and the engine report, and renders /metrics from it.

Everything here runs on the API process's event loop and touches only this process's memory.
"""

from __future__ import annotations

from typing import Literal, Protocol

from server.messages import EngineReady, EngineStats, FinishReason
from server.metrics import names
from server.metrics.exposition import Exposition, Names
from server.metrics.instruments import distributions, numbers
from server.metrics.speculation import SpeculationMetrics

RejectionReason = Literal["queue_full", "key_limit", "loading", "draining", "engine_dead", "invalid", "unauthorized"]


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
        self._running = numbers(names.REQUESTS_RUNNING)
        self._waiting = numbers(names.REQUESTS_WAITING)
        self._kv_usage = numbers(names.KV_CACHE_USAGE)
        self._engine_up = numbers(names.ENGINE_UP)
        self._start_time = numbers(names.START_TIME)
        self._build = numbers(names.BUILD_INFO)
        self._prompt_tokens = numbers(names.PROMPT_TOKENS)
        self._generation_tokens = numbers(names.GENERATION_TOKENS)
        self._requests = numbers(names.REQUESTS)
        self._rejected = numbers(names.REJECTED_REQUESTS)
        self._http_requests = numbers(names.HTTP_REQUESTS)
        self._preemptions = numbers(names.PREEMPTIONS)
        self._prefix_queries = numbers(names.PREFIX_CACHE_QUERIES)
        self._prefix_hits = numbers(names.PREFIX_CACHE_HITS)
        self._first_token = distributions(names.TIME_TO_FIRST_TOKEN)
        self._inter_token = distributions(names.INTER_TOKEN)
        self._per_token = distributions(names.TIME_PER_OUTPUT_TOKEN)
        self._request = distributions(names.REQUEST_SECONDS)
        self._queue = distributions(names.REQUEST_QUEUE_SECONDS)
        self._prefill = distributions(names.REQUEST_PREFILL_SECONDS)
        self._decode = distributions(names.REQUEST_DECODE_SECONDS)
        self._request_prompt = distributions(names.REQUEST_PROMPT_TOKENS)
        self._request_generation = distributions(names.REQUEST_GENERATION_TOKENS)
        self._longest_choice = distributions(names.LONGEST_CHOICE_TOKENS)
        self._steps = distributions(names.STEP_SECONDS_BY_PHASE)
        self._backends = numbers(names.BACKEND_INFO)
        self._kv_groups = numbers(names.KV_GROUP_INFO)
        self._cache_config = numbers(names.CACHE_CONFIG_INFO)
        self._models = numbers(names.MODEL_INFO)
        self.generated = 0
        """Tokens delivered to clients since the start."""
        self.speculation = SpeculationMetrics()
        self._exposition = Exposition(
            model_name,
            shown,
            (
                self._running,
                self._waiting,
                self._kv_usage,
                self._engine_up,
                self._start_time,
                self._build,
                self._prompt_tokens,
                self._generation_tokens,
                self._requests,
                self._rejected,
                self._http_requests,
                self._preemptions,
                self._prefix_queries,
                self._prefix_hits,
                self._first_token,
                self._inter_token,
                self._per_token,
                self._request,
                self._queue,
                self._prefill,
                self._decode,
                self._request_prompt,
                self._request_generation,
                self._longest_choice,
                self._steps,
                *self.speculation.families,
                self._backends,
                self._kv_groups,
                self._cache_config,
                self._models,
            ),
        )

    def render(self, accept: str) -> tuple[bytes, str]:
        """The body of /metrics and its content type, for a request's Accept header."""
        return self._exposition.render(accept)

    def started(self, version: str, unix_time: float) -> None:
        """Show which server this is and since when it runs, seconds since 1970."""
        self._build.of(version).set(1)
        self._start_time.of().set(unix_time)

    def prompt_tokens(self, count: int) -> None:
        """Count a prompt that the engine has read."""
        self._prompt_tokens.of().add(count)

    def generation_tokens(self, count: int) -> None:
        """Count tokens delivered to a client."""
        self._generation_tokens.of().add(count)
        self.generated += count

    def time_to_first_token(self, seconds: float) -> None:
        """Note how long one sequence's first token took."""
        self._first_token.of().observe(seconds)

    def token_intervals(self, seconds: float, count: int) -> None:
        """Note `count` tokens that came `seconds` apart."""
        self._inter_token.of().observe(seconds, count)

    def sequence_finished(self, sequence: FinishedSequence) -> None:
        """Note the times and lengths of a sequence that has ended."""
        self._requests.of(sequence.finish_reason).add(1)
        self._request.of().observe(sequence.total_seconds)
        self._request_prompt.of().observe(sequence.prompt_tokens)
        self._request_generation.of().observe(sequence.generation_tokens)
        for histogram, seconds in (
            (self._queue, sequence.queue_seconds),
            (self._prefill, sequence.prefill_seconds),
            (self._decode, sequence.decode_seconds),
        ):
            if seconds is not None:
                histogram.of().observe(seconds)
        if sequence.decode_seconds is not None and sequence.generation_tokens > 1:
            self._per_token.of().observe(sequence.decode_seconds / (sequence.generation_tokens - 1))

    def request_finished(self, longest: int) -> None:
        """Note the tokens of the longest choice of a request that has ended."""
        self._longest_choice.of().observe(longest)

    def rejected(self, reason: RejectionReason) -> None:
        """Count a request that was refused."""
        self._rejected.of(reason).add(1)

    def http_request(self, route: str, method: str, status: int) -> None:
        """Count an HTTP answer; `route` and `method` must come from a bounded set."""
        self._http_requests.of(route, method, str(status)).add(1)

    def engine_up(self, is_up: bool) -> None:
        """Show whether the engine is there and answering."""
        self._engine_up.of().set(is_up)

    def engine_ready(self, ready: EngineReady) -> None:
        """Show what the engine built, as it read it back."""
        for row in ready.rows:
            self._backends.of(row.role, row.component, row.requested, row.resolved, row.source).set(1)
        for group in ready.kv_groups:
            sizes = (group.group, group.block_size, group.kernel_page_size, group.num_blocks, group.layers)
            self._kv_groups.of(*map(str, sizes)).set(1)
        for group in ready.kv_groups[:1]:  # a picker reads one series: the first group is the target's
            self._cache_config.of("0", str(group.block_size), str(group.num_blocks)).set(1)
        for model in ready.models:
            self._models.of(model.role, model.architecture, str(model.parameters), model.path_hash, model.method).set(1)
        if ready.speculative is not None:
            self.speculation.ready(ready.speculative)

    def engine_stats(self, stats: EngineStats) -> None:
        """Take over a snapshot of the engine, whose counters are totals."""
        self._running.of().set(stats.running)
        self._waiting.of().set(stats.waiting)
        self._kv_usage.of().set(stats.kv_usage)
        self._preemptions.of().set(stats.preemptions)
        self._prefix_queries.of().set(stats.prefix_queries)
        self._prefix_hits.of().set(stats.prefix_hits)
        for phase, durations in stats.phase_seconds.items():
            for seconds in durations:
                self._steps.of(phase).observe(seconds)
        self.speculation.counts(stats.drafts)

    def engine_lost(self) -> None:
        """The engine is dead: nothing runs or waits any more."""
        for gauge in (self._running, self._waiting, self._kv_usage):
            gauge.of().set(0)
