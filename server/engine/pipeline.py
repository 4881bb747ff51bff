"""Steps that overlap: the next one is planned and launched before the last one's tokens are known."""

from __future__ import annotations

import logging

from server.engine.executor import DEVICE_LOST
from server.engine.request import Draft, Request
from server.engine.run_ahead import Launched, Outcome, RunAhead
from server.engine.scheduler import Scheduler
from server.engine.step import RowResult, StepPlan, StepRow
from server.messages import RequestOutput
from server.spec.speculator import Speculator

logger = logging.getLogger(__name__)


class Pipeline:
    """Runs the engine's steps while all sequences decode and nobody waits for a place.

    A sequence that ends is known to end one step late: what the step after it made for it is dropped, and the blocks
    are safe, since whoever gets them next writes later on the same stream.
    """

    def __init__(
        self, run_ahead: RunAhead, scheduler: Scheduler, speculator: Speculator | None, step_failed: str
    ) -> None:
        """Join the parts.

        Args:
            run_ahead: launches steps.
            scheduler: owns the requests.
            speculator: says how much is drafted, and counts.
            step_failed: what the requests of a step that failed are told.
        """
        self._run_ahead = run_ahead
        self._scheduler = scheduler
        self._speculator = speculator
        self._step_failed = step_failed
        self._flying: Launched | None = None
        self.steps = 0
        """Launched since the start."""

    def advance(self, outputs: list[RequestOutput], phase_seconds: dict[str, list[float]]) -> bool:
        """Launch the next step, then commit the one before it.

        Args:
            outputs: what was made is appended.
            phase_seconds: the durations of the committed step's phases are appended.

        Returns:
            False when there was nothing to do here: no step is under way, and the next one needs planning.
        """
        previous, self._flying = self._flying, None
        requests = self._next()
        if requests:
            try:
                self._flying = self._run_ahead.launch(requests, self._wanted)
            except DEVICE_LOST:
                raise
            except Exception:
                logger.exception("a step of %d requests failed; they end with an error", len(requests))
                if previous is not None:
                    outputs += self._commit(previous, phase_seconds)
                outputs += self._scheduler.fail(_plan(requests, [0] * len(requests)), self._step_failed)
                self._run_ahead.forget()
                return True
            self.steps += 1
            for request in requests:
                request.in_flight += 1
        if previous is not None:
            outputs += self._commit(previous, phase_seconds)
        return self._flying is not None or previous is not None

    @property
    def busy(self) -> bool:
        """Whether a step is under way."""
        return self._flying is not None

    def interrupt(self) -> None:
        """Another step is about to run: the device's state will be out of date. None may be under way."""
        self._run_ahead.forget()

    def _next(self) -> list[Request] | None:
        run_ahead = self._run_ahead
        requests = self._scheduler.ahead(run_ahead.per_step, run_ahead.drafts)
        if not requests or not all(run_ahead.serves(request) for request in requests):
            return None
        # Without drafts, verification would only cost; with none wanted, the plain way is cheaper.
        if run_ahead.drafts and not any(self._wanted(request) for request in requests):
            return None
        return requests

    def _wanted(self, request: Request) -> int:
        return self._speculator.wanted(request, self._scheduler.running) if self._speculator is not None else 0

    def _commit(self, launched: Launched, phase_seconds: dict[str, list[float]]) -> list[RequestOutput]:
        outcomes = self._run_ahead.collect(launched, phase_seconds)
        for request in launched.requests:
            request.in_flight -= 1
        plan = _plan(launched.requests, launched.limits)
        outputs = self._scheduler.commit(
            plan, [RowResult(outcome.token_ids, broken=outcome.broken) for outcome in outcomes]
        )
        if self._speculator is not None:
            self._speculator.observe(plan, outputs)
        self._scheduler.settle(plan)
        if self._run_ahead.drafts:
            self._hand_over_drafts(launched.requests, outcomes)
        return outputs

    def _hand_over_drafts(self, requests: list[Request], outcomes: list[Outcome]) -> None:
        """What was proposed last, for a step that is not run here. A later step that is under way has its own."""
        for request, outcome in zip(requests, outcomes, strict=True):
            if request.blocks and not request.in_flight:
                limit = self._run_ahead.limit(request, self._wanted(request))
                request.draft = Draft(outcome.drafts[:limit])
                # All drafted tokens but the last are in the draft's own cache.
                request.draft_computed = len(request.tokens) + self._run_ahead.drafts - 1


def _plan(requests: list[Request], limits: list[int]) -> StepPlan:
    """A step for the scheduler's books; the drafted ids are not known to the host, and it does not need them."""
    return StepPlan(
        tuple(
            StepRow(request, request.computed, 1 + limit, completes=True, drafts=(0,) * limit)
            for request, limit in zip(requests, limits, strict=True)
        )
    )
