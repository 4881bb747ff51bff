"""Sums up what the load generator saw: throughput, latencies and their percentiles, errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from server.bench.http import RequestResult

SHOWN_ERRORS = 5


class Spread(Struct, frozen=True):
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


class Report(Struct, frozen=True):
    """The outcome of a run. Latencies are over requests that succeeded; None when there were no samples."""

    requests: int
    failed: int
    seconds: float
    requests_per_second: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_second: float
    time_to_first_token_ms: Spread | None
    time_per_output_token_ms: Spread | None
    """Per request: time from its first token to its last over its tokens after the first."""
    inter_token_ms: Spread | None
    """Between stream events that carry text."""
    request_ms: Spread | None
    errors: dict[str, int]
    """Messages and how often each came."""


def summarize(results: Sequence[RequestResult]) -> Report:
    """The report on `results`, which must not be empty."""
    good = [result for result in results if result.error is None]
    seconds = max(result.ended for result in results) - min(result.started for result in results)
    output_tokens = sum(result.completion_tokens for result in good)
    return Report(
        requests=len(results),
        failed=len(results) - len(good),
        seconds=seconds,
        requests_per_second=len(good) / seconds,
        prompt_tokens=sum(result.prompt_tokens for result in good),
        output_tokens=output_tokens,
        output_tokens_per_second=output_tokens / seconds,
        time_to_first_token_ms=_spread([r.first_token for r in good if r.first_token is not None]),
        time_per_output_token_ms=_spread(
            [r.decode_seconds / (r.completion_tokens - 1) for r in good if r.completion_tokens > 1 and r.gaps]
        ),
        inter_token_ms=_spread([gap for r in good for gap in r.gaps]),
        request_ms=_spread([r.ended - r.started for r in good]),
        errors=dict(Counter(r.error for r in results if r.error is not None)),
    )


def show(report: Report, console: Console) -> None:
    """Print the report for people."""
    table = Table(box=None, pad_edge=False)
    for title in ("milliseconds", "mean", "p50", "p90", "p99"):
        table.add_column(title, justify="left" if title == "milliseconds" else "right")
    for title, spread in (
        ("time to first token", report.time_to_first_token_ms),
        ("time per output token", report.time_per_output_token_ms),
        ("between events", report.inter_token_ms),
        ("whole request", report.request_ms),
    ):
        if spread is not None:
            table.add_row(title, *(f"{value:.1f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99)))
    console.print(
        f"{report.requests - report.failed} of {report.requests} requests in {report.seconds:.2f} s: "
        f"{report.output_tokens_per_second:.1f} output tok/s, {report.requests_per_second:.2f} requests/s "
        f"({report.prompt_tokens} prompt tokens, {report.output_tokens} output tokens)",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    for message, count in Counter(report.errors).most_common(SHOWN_ERRORS):
        console.print(f"{count} failed: {message}", style="red", highlight=False, markup=False, soft_wrap=True)


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """The value at `share` (0 to 1) of sorted samples, between neighbours by linear interpolation."""
    position = share * (len(sorted_values) - 1)
    low = math.floor(position)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (position - low)


def to_builtins(report: Report) -> dict[str, Any]:
    """The report as plain values for JSON."""
    return {name: _plain(getattr(report, name)) for name in report.__struct_fields__}


def _plain(value: Any) -> Any:
    return {name: getattr(value, name) for name in value.__struct_fields__} if isinstance(value, Spread) else value


def _spread(seconds: list[float]) -> Spread | None:
    if not seconds:
        return None
    values = sorted(1000 * second for second in seconds)
    return Spread(
        mean=sum(values) / len(values),
        p50=percentile(values, 0.5),
        p90=percentile(values, 0.9),
        p99=percentile(values, 0.99),
    )
