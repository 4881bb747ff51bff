"""The part of /metrics that tells how drafts fare."""

from __future__ import annotations

from server.messages import DraftCounts, SpeculativeInfo
from server.metrics import names
from server.metrics.instruments import Distribution, Family, Instrument, distributions, numbers


class SpeculationMetrics:
    """Shows the engine's own totals: it counts nothing itself, so that all of them agree."""

    def __init__(self) -> None:
        self._drafts = numbers(names.SPEC_DRAFTS)
        self._drafted = numbers(names.SPEC_DRAFT_TOKENS)
        self._accepted = numbers(names.SPEC_ACCEPTED_TOKENS)
        self._drafted_at = numbers(names.SPEC_DRAFT_TOKENS_PER_POSITION)
        self._accepted_at = numbers(names.SPEC_ACCEPTED_TOKENS_PER_POSITION)
        self._lengths = distributions(names.SPEC_ACCEPTED_LENGTH)
        self._chosen = distributions(names.SPEC_CHOSEN)
        self._watchdogs = numbers(names.SPEC_WATCHDOG)
        self._synthetic = numbers(names.SPEC_SYNTHETIC)
        self._info = numbers(names.SPEC_INFO)
        self.families: tuple[Family[Instrument], ...] = (
            self._drafts,
            self._drafted,
            self._accepted,
            self._drafted_at,
            self._accepted_at,
            self._lengths,
            self._chosen,
            self._watchdogs,
            self._synthetic,
            self._info,
        )

    def ready(self, info: SpeculativeInfo) -> None:
        """Show how the engine drafts, with all positions of a draft at 0."""
        rejection = "synthetic" if info.synthetic else "standard"
        adaptive = str(info.adaptive).lower()
        k = info.num_speculative_tokens
        self._info.of(info.method, str(k), adaptive, info.draft_sample_method, rejection).set(1)
        self._synthetic.of().set(info.synthetic)
        self._make_room(k)

    def counts(self, counts: DraftCounts) -> None:
        """Take over the engine's totals; empty ones of a server that does not speculate leave all at 0."""
        if not counts.lengths:
            return
        if len(counts.lengths) != len(self._lengths.of().buckets):
            self._make_room(len(counts.lengths) - 1)
        accepted = sum(counts.accepted)
        self._drafts.of().set(sum(counts.lengths))
        self._drafted.of().set(sum(counts.drafted))
        self._accepted.of().set(accepted)
        for family, totals in ((self._drafted_at, counts.drafted), (self._accepted_at, counts.accepted)):
            for position, total in enumerate(totals):
                family.of(str(position)).set(total)
        self._lengths.of().set(counts.lengths, accepted)
        chosen = counts.chosen or [0] * len(counts.lengths)
        self._chosen.of().set(chosen, sum(k * steps for k, steps in enumerate(chosen)))

    def watchdog(self, kind: str, barks: bool) -> None:
        """Show whether a watchdog of `names.WATCHDOGS` has something to say."""
        self._watchdogs.of(kind).set(barks)

    def _make_room(self, k: int) -> None:
        """Positions 0 … k - 1 and buckets 0 … k."""
        for position in range(k):
            for family in (self._drafted_at, self._accepted_at):
                family.of(str(position))
        for histogram in (self._lengths, self._chosen):
            histogram.replace(lambda: Distribution(range(k + 1)))
