"""Every metric of the server: name, kind, meaning, labels, buckets, and its twin under vLLM's name.

The common label `model_name` (the served name) comes first on all of them. A twin carries the same numbers with the
labels `model_name` and `engine="0"` and, where vLLM calls a label otherwise, its name for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""For a whole request or a part of it."""
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
"""For one token."""
STEP_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""For one phase of one step."""
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

FINISH_REASONS = ("stop", "length", "abort", "error")
REJECTIONS = ("queue_full", "key_limit", "loading", "draining", "engine_dead", "invalid", "unauthorized")
PHASES = ("schedule", "target", "draft", "verify")
WATCHDOGS = ("near_zero", "collapsed")


@dataclass(frozen=True)
class Metric:
    """One metric family. `name` is that of its series, so a counter's ends in _total."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    """Beside model_name."""
    values: tuple[tuple[str, ...], ...] = ((),)
    """The label values that exist from the start; empty for what is known only later."""
    buckets: tuple[float, ...] = ()
    twin: str | None = None
    earlier_twins: tuple[str, ...] = ()
    """Names that vLLM gave it before; dashboards that were made then still ask for them."""
    twin_labels: Mapping[str, str] = field(default_factory=dict)
    """vLLM's name for a label of ours."""


def _each(values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    return tuple((value,) for value in values)


REQUESTS_RUNNING = Metric(
    "outrider_requests_running",
    "gauge",
    "Sequences that take part in the engine's steps now.",
    twin="vllm:num_requests_running",
)
REQUESTS_WAITING = Metric(
    "outrider_requests_waiting",
    "gauge",
    "Sequences that wait for their first step, or again after a preemption.",
    twin="vllm:num_requests_waiting",
)
KV_CACHE_USAGE = Metric(
    "outrider_kv_cache_usage_ratio",
    "gauge",
    "Share of KV cache blocks that live sequences hold, 0 to 1.",
    twin="vllm:kv_cache_usage_perc",
    earlier_twins=("vllm:gpu_cache_usage_perc",),
)
ENGINE_UP = Metric(
    "outrider_engine_up", "gauge", "1 while the engine process has loaded its model and is answering, else 0."
)

START_TIME = Metric("outrider_start_time_seconds", "gauge", "Unix time at which the server was started.")
BUILD_INFO = Metric("outrider_build_info", "gauge", "1; the server's version.", ("version",), ())

PROMPT_TOKENS = Metric(
    "outrider_prompt_tokens_total",
    "counter",
    "Prompt tokens of requests that got a first token.",
    twin="vllm:prompt_tokens_total",
)
GENERATION_TOKENS = Metric(
    "outrider_generation_tokens_total",
    "counter",
    "Tokens delivered to clients; the sum of usage.completion_tokens.",
    twin="vllm:generation_tokens_total",
)
REQUESTS = Metric(
    "outrider_requests_total",
    "counter",
    "Sequences that ended, by reason.",
    ("finish_reason",),
    _each(FINISH_REASONS),
    twin="vllm:request_success_total",
    twin_labels={"finish_reason": "finished_reason"},
)
REJECTED_REQUESTS = Metric(
    "outrider_rejected_requests_total",
    "counter",
    "Requests refused before they reached the engine, by reason.",
    ("reason",),
    _each(REJECTIONS),
)
HTTP_REQUESTS = Metric(
    "outrider_http_requests_total",
    "counter",
    "HTTP answers, by route template, method and status.",
    ("route", "method", "status"),
    (),
)
PREEMPTIONS = Metric(
    "outrider_preemptions_total",
    "counter",
    "Times that a running sequence gave up its blocks to be computed again later.",
    twin="vllm:num_preemptions_total",
)
PREFIX_CACHE_QUERIES = Metric(
    "outrider_prefix_cache_queries_total",
    "counter",
    "Prompt tokens looked up in the prefix cache.",
    twin="vllm:prefix_cache_queries_total",
    earlier_twins=("vllm:gpu_prefix_cache_queries_total",),
)
PREFIX_CACHE_HITS = Metric(
    "outrider_prefix_cache_hits_total",
    "counter",
    "Prompt tokens found in the prefix cache.",
    twin="vllm:prefix_cache_hits_total",
    earlier_twins=("vllm:gpu_prefix_cache_hits_total",),
)

TIME_TO_FIRST_TOKEN = Metric(
    "outrider_time_to_first_token_seconds",
    "histogram",
    "From the arrival of a request to its first token.",
    buckets=SECONDS,
    twin="vllm:time_to_first_token_seconds",
)
INTER_TOKEN = Metric(
    "outrider_inter_token_seconds",
    "histogram",
    "Time between tokens of a sequence, one sample per token after the first; tokens of one step share its time.",
    buckets=TOKEN_SECONDS,
    twin="vllm:inter_token_latency_seconds",
    earlier_twins=("vllm:time_per_output_token_seconds",),
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "outrider_request_time_per_output_token_seconds",
    "histogram",
    "Mean time between tokens of a sequence, one sample per finished sequence of at least two tokens.",
    buckets=TOKEN_SECONDS,
    twin="vllm:request_time_per_output_token_seconds",
)
REQUEST_SECONDS = Metric(
    "outrider_request_seconds",
    "histogram",
    "From the arrival of a request to its last token.",
    buckets=SECONDS,
    twin="vllm:e2e_request_latency_seconds",
)
REQUEST_QUEUE_SECONDS = Metric(
    "outrider_request_queue_seconds",
    "histogram",
    "From the arrival of a request to its first step.",
    buckets=SECONDS,
    twin="vllm:request_queue_time_seconds",
)
REQUEST_PREFILL_SECONDS = Metric(
    "outrider_request_prefill_seconds",
    "histogram",
    "From the first step of a request to its first token.",
    buckets=SECONDS,
    twin="vllm:request_prefill_time_seconds",
)
REQUEST_DECODE_SECONDS = Metric(
    "outrider_request_decode_seconds",
    "histogram",
    "From the first token of a request to its last.",
    buckets=SECONDS,
    twin="vllm:request_decode_time_seconds",
)
REQUEST_PROMPT_TOKENS = Metric(
    "outrider_request_prompt_tokens",
    "histogram",
    "Prompt tokens per sequence.",
    buckets=TOKENS,
    twin="vllm:request_prompt_tokens",
)
REQUEST_GENERATION_TOKENS = Metric(
    "outrider_request_generation_tokens",
    "histogram",
    "Tokens delivered per sequence.",
    buckets=TOKENS,
    twin="vllm:request_generation_tokens",
)
LONGEST_CHOICE_TOKENS = Metric(
    "outrider_request_longest_choice_tokens",
    "histogram",
    "Tokens delivered in the longest choice of a request that has ended.",
    buckets=TOKENS,
    twin="vllm:request_max_num_generation_tokens",
)
STEP_SECONDS_BY_PHASE = Metric(
    "outrider_step_seconds",
    "histogram",
    "Where the time of the engine's steps goes.",
    ("phase",),
    _each(PHASES),
    buckets=STEP_SECONDS,
)

# Position 0 and the bucket of 0 are there even when the server does not speculate; the engine says how many follow.
SPEC_DRAFTS = Metric(
    "outrider_spec_decode_drafts_total",
    "counter",
    "Drafts of at least one token that the target verified.",
    twin="vllm:spec_decode_num_drafts_total",
)
SPEC_DRAFT_TOKENS = Metric(
    "outrider_spec_decode_draft_tokens_total",
    "counter",
    "Tokens that were really drafted and verified; none beyond the end of a request.",
    twin="vllm:spec_decode_num_draft_tokens_total",
)
SPEC_ACCEPTED_TOKENS = Metric(
    "outrider_spec_decode_accepted_tokens_total",
    "counter",
    "Drafted tokens that the target confirmed; the token that it adds itself is not counted.",
    twin="vllm:spec_decode_num_accepted_tokens_total",
)
SPEC_DRAFT_TOKENS_PER_POSITION = Metric(
    "outrider_spec_decode_draft_tokens_per_position_total",
    "counter",
    "Tokens drafted and verified, by their position in the draft from 0.",
    ("position",),
    (("0",),),
    twin="vllm:spec_decode_num_draft_tokens_per_pos_total",
)
SPEC_ACCEPTED_TOKENS_PER_POSITION = Metric(
    "outrider_spec_decode_accepted_tokens_per_position_total",
    "counter",
    "Drafted tokens that the target confirmed, by their position in the draft from 0.",
    ("position",),
    (("0",),),
    twin="vllm:spec_decode_num_accepted_tokens_per_pos_total",
)
SPEC_ACCEPTED_LENGTH = Metric(
    "outrider_spec_decode_accepted_length",
    "histogram",
    "Tokens confirmed per draft, 0 to k.",
    buckets=(0,),
)
SPEC_CHOSEN = Metric(
    "outrider_spec_decode_chosen_tokens",
    "histogram",
    "The most tokens that a request was let draft, per step, 0 to k: what adaptive_k decided for the load.",
    buckets=(0,),
)
SPEC_WATCHDOG = Metric(
    "outrider_spec_decode_watchdog",
    "gauge",
    "1 while drafts fare so badly that something may be wrong with them: near_zero, hardly any token is accepted; "
    "collapsed, first tokens are and later ones are not.",
    ("kind",),
    _each(WATCHDOGS),
)
SPEC_SYNTHETIC = Metric(
    "outrider_spec_decode_synthetic", "gauge", "1 when drafts are accepted by lot: the text is worth nothing."
)
SPEC_INFO = Metric(
    "outrider_spec_decode_info",
    "gauge",
    "1; how the server drafts.",
    ("method", "num_speculative_tokens", "adaptive", "draft_sample_method", "rejection_sample_method"),
    (),
)

BACKEND_INFO = Metric(
    "outrider_backend_info",
    "gauge",
    "1; what was asked for and what the built layers really hold.",
    ("role", "component", "requested", "resolved", "source"),
    (),
)
KV_GROUP_INFO = Metric(
    "outrider_kv_group_info",
    "gauge",
    "1; a group of layers that share block tables.",
    ("group", "block_size", "kernel_page_size", "num_blocks", "layers"),
    (),
)
CACHE_CONFIG_INFO = Metric(
    "vllm:cache_config_info",
    "gauge",
    "1; the KV cache under the labels that endpoint pickers read.",
    ("engine", "block_size", "num_gpu_blocks"),
    (),
)
MODEL_INFO = Metric(
    "outrider_model_info",
    "gauge",
    "1; what was really loaded.",
    ("role", "architecture", "parameters", "path_hash", "method"),
    (),
)
