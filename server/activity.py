"""What is logged while the server is busy: a line on throughput and drafts, and what the watchdogs notice."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

from server.logs import fields
from server.messages import DraftCounts, EngineStats, SpeculativeInfo
from server.spec.acceptance import acceptance_length, rates, since
from server.spec.watchdog import AcceptanceWatchdog

_log = logging.getLogger("server.activity")

LINE_SECONDS = 10.0
SYNTHETIC = (
    "SYNTHETIC ACCEPTANCE: drafts are accepted by lot, whatever the model says. The text is worth nothing; this is for "
    "benchmarks only."
)


class ActivityLog:
    """Fed with the engine's snapshots as they come."""

    def __init__(self, on_watchdog: Callable[[str, bool], None]) -> None:
        """Make one.

        Args:
            on_watchdog: told the kind of a watchdog that begins (True) or ceases (False) to bark.
        """
        self._on_watchdog = on_watchdog
        self._watchdog: AcceptanceWatchdog | None = None
        self._began: float | None = None
        self._steps = 0
        self._generated = 0
        self._drafts = DraftCounts()

    def ready(self, info: SpeculativeInfo | None) -> None:
        """Learn how the engine drafts. Drafts that are accepted by lot are not watched."""
        if info is not None and info.synthetic:
            _log.warning("%s", SYNTHETIC)
        elif info is not None:
            self._watchdog = AcceptanceWatchdog()

    def observe(self, stats: EngineStats, generated: int, now: float) -> None:
        """Take a snapshot.

        Args:
            stats: the engine's.
            generated: tokens delivered since the start.
            now: monotonic seconds.
        """
        if self._watchdog is not None:
            for change in self._watchdog.observe(stats.drafts):
                _log.log(
                    logging.WARNING if change.barks else logging.INFO,
                    "%s",
                    change.message,
                    extra=fields(watchdog=change.kind, barks=change.barks),
                )
                self._on_watchdog(change.kind, change.barks)
        if self._began is not None and now - self._began < LINE_SECONDS:
            return
        if self._began is not None and stats.steps > self._steps:
            figures = self._figures(stats, (generated - self._generated) / (now - self._began))
            _log.info("%s", _line(figures), extra=fields(**asdict(figures)))
        self._began, self._steps, self._generated, self._drafts = now, stats.steps, generated, stats.drafts

    def _figures(self, stats: EngineStats, tokens_per_second: float) -> _Figures:
        drafts = since(self._drafts, stats.drafts)
        length = acceptance_length(drafts)
        return _Figures(
            tokens_per_second=round(tokens_per_second, 1),
            running=stats.running,
            waiting=stats.waiting,
            kv_cache_usage=round(stats.kv_usage, 4),
            drafts=sum(drafts.lengths),
            acceptance_length=None if length is None else round(length, 2),
            acceptance_by_position=[None if rate is None else round(rate, 2) for rate in rates(drafts)],
        )


@dataclass(frozen=True)
class _Figures:
    """What happened since the last line."""

    tokens_per_second: float
    running: int
    waiting: int
    kv_cache_usage: float
    drafts: int
    acceptance_length: float | None
    acceptance_by_position: list[float | None]


def _line(figures: _Figures) -> str:
    line = (
        f"{figures.tokens_per_second:.1f} tokens/s, {figures.running} running, {figures.waiting} waiting, "
        f"KV cache {figures.kv_cache_usage:.0%} used"
    )
    if figures.acceptance_length is None:
        return line
    by_position = " ".join("-" if rate is None else f"{rate:.2f}" for rate in figures.acceptance_by_position)
    return (
        f"{line}; {figures.drafts} drafts, acceptance length {figures.acceptance_length:.2f}, by position {by_position}"
    )
