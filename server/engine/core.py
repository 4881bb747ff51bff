"""The engine's loop: receive, schedule, run, commit, send."""

from __future__ import annotations

import logging
import time

from server.engine.executor import DEVICE_LOST, PhaseSeconds, StepExecutor
from server.engine.grammar_compile import GrammarCompiler
from server.engine.link import Link
from server.engine.models.draft import TargetHidden
from server.engine.pipeline import Pipeline
from server.engine.request import Request
from server.engine.run_ahead import RunAhead
from server.engine.sampling.grammar import GrammarError, GrammarState
from server.engine.sampling.request import RequestSampling
from server.engine.scheduler import Scheduler
from server.engine.step import BlockCopy, StepPlan
from server.messages import Abort, DraftCounts, EngineOutputs, EngineRequest, EngineStats, RequestOutput, Shutdown
from server.spec.speculator import Speculator

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
_COMPILING_SECONDS = 0.002
"""How long to wait for messages where nothing but grammars is under way."""
STEP_FAILED = "The engine failed on a step with this request; its log says why."


class EngineCore:
    """Moves requests from the link through the scheduler and the runner, and tokens back."""

    def __init__(
        self,
        link: Link,
        scheduler: Scheduler,
        executor: StepExecutor,
        speculator: Speculator | None,
        grammars: GrammarCompiler,
        vocab_size: int,
        sampled_vocab_size: int,
        max_model_len: int,
        run_ahead: RunAhead | None = None,
    ) -> None:
        """Join the parts.

        Args:
            link: to the API process.
            scheduler: owns the requests.
            executor: runs the target.
            speculator: drafts, or None.
            grammars: compiles what requests bind their answers to.
            vocab_size: ids that the model embeds.
            sampled_vocab_size: ids that the tokenizer knows; the rest of the embedding is padding.
            max_model_len: tokens of the longest sequence.
            run_ahead: launches steps before the last one's tokens are known; None to wait for each.
        """
        self._link = link
        self._scheduler = scheduler
        self._executor = executor
        self._speculator = speculator
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._sampled_vocab_size = sampled_vocab_size
        self._max_model_len = max_model_len
        self._steps = 0
        self._phase_seconds: PhaseSeconds = {}
        self._checked = True
        self._unsent: list[RequestOutput] = []
        self._pipeline = Pipeline(run_ahead, scheduler, speculator, STEP_FAILED) if run_ahead is not None else None

    def run(self) -> None:
        """Until told to shut down."""
        while self.round():
            pass

    def round(self) -> bool:
        """Take messages, run a step if there is anything to do, send; False when told to shut down."""
        outputs, self._unsent = self._unsent, []
        if not self._take_messages(outputs):
            return False
        if self._pipeline is not None and self._pipeline.advance(outputs, self._phase_seconds):
            self._link.send(EngineOutputs(outputs, self._stats()))
            self._clear(self._scheduler.take_spoiled())
            return True
        started = time.perf_counter()
        plan = self._scheduler.schedule()
        hidden = None
        if plan is not None:
            if self._pipeline is not None:
                self._pipeline.interrupt()
            self._phase_seconds.setdefault("schedule", []).append(time.perf_counter() - started)
            hidden = self._step(plan, outputs)
        elif not self._checked:
            self._scheduler.check()
            self._checked = True
        self._link.send(EngineOutputs(outputs, self._stats()))
        # The tokens are on their way; what follows prepares the next step.
        if plan is not None and hidden is not None:
            self._unsent = self._finish(plan, hidden)
            self._clear(self._scheduler.take_spoiled())
        return True

    def _clear(self, blocks: list[int]) -> None:
        """Overwrite blocks with block 0, which nobody writes: masked padding must still be finite."""
        if blocks:
            copies = [BlockCopy(0, block) for block in blocks]
            self._executor.runner.copy_blocks(copies)
            if self._speculator is not None:
                self._speculator.copy_blocks(copies)

    def _take_messages(self, outputs: list[RequestOutput]) -> bool:
        wait = 0.0
        if self._scheduler.running == self._scheduler.waiting == 0 and self._checked:
            # Whatever was checked is still so, and whatever was not is checked after this round.
            wait = _COMPILING_SECONDS if self._grammars.waiting else HEARTBEAT_SECONDS
        for message in self._link.receive(wait):
            self._checked = False
            match message:
                case EngineRequest():
                    self._add(message, outputs)
                case Abort(request_ids):
                    self._grammars.abort(request_ids)
                    self._scheduler.abort(request_ids)
                case Shutdown():
                    return False
        for source, compiled in self._grammars.take_ready():
            self._checked = False
            if isinstance(compiled, GrammarError):
                outputs.append(_refusal(source, str(compiled)))
            else:
                self._enter(source, compiled.start(source.params.stop_token_ids), outputs)
        return True

    def _add(self, source: EngineRequest, outputs: list[RequestOutput]) -> None:
        prompt = source.prompt_token_ids
        # The API process has validated the request; the engine still lets none end the process.
        if not prompt or len(prompt) > self._max_model_len:
            problem = f"a prompt has 1 to {self._max_model_len} tokens, this one has {len(prompt)}"
            outputs.append(_refusal(source, problem))
        elif not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            outputs.append(_refusal(source, f"token ids run from 0 to {self._vocab_size - 1}"))
        elif source.params.grammar is not None:
            self._grammars.add(source, source.params.grammar)
        else:
            self._enter(source, None, outputs)

    def _enter(self, source: EngineRequest, grammar: GrammarState | None, outputs: list[RequestOutput]) -> None:
        prompt = source.prompt_token_ids
        try:
            sampling = RequestSampling(source.params, prompt, self._sampled_vocab_size, grammar)
        except ValueError as error:
            outputs.append(_refusal(source, str(error)))
            return
        limit = min(len(prompt) + source.params.max_tokens, self._max_model_len)
        self._scheduler.add(Request(source, sampling, limit, list(prompt)))

    def _step(self, plan: StepPlan, outputs: list[RequestOutput]) -> TargetHidden | None:
        """Run and commit a step; None when it failed, which ends its requests and no others."""
        self._steps += 1
        try:
            if plan.copies and self._speculator is not None:
                self._speculator.copy_blocks(plan.copies)
            result = self._executor.execute(plan, self._phase_seconds)
        except DEVICE_LOST:
            raise
        except Exception:
            logger.exception("a step of %d requests failed; they end with an error", len(plan.rows))
            outputs += self._scheduler.fail(plan, STEP_FAILED)
            return None
        committed = self._scheduler.commit(plan, result.rows)
        if self._speculator is not None:
            self._speculator.observe(plan, committed)
        outputs += committed
        return result.hidden

    def _finish(self, plan: StepPlan, hidden: TargetHidden) -> list[RequestOutput]:
        """Settle a step, drafting where drafts are made; a failure there ends the requests that it left unfinished."""
        if self._speculator is None:
            self._scheduler.settle(plan)
            return []
        try:
            self._speculator.draft(plan, hidden, self._scheduler, self._phase_seconds)
        except DEVICE_LOST:
            raise
        except Exception:
            logger.exception("drafting for %d requests failed; they end with an error", len(plan.rows))
            return self._scheduler.fail(plan, STEP_FAILED)
        return []

    def _stats(self) -> EngineStats:
        phases, self._phase_seconds = self._phase_seconds, {}
        kv = self._scheduler.kv
        return EngineStats(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting + self._grammars.waiting,
            kv_usage=kv.pool.usage,
            preemptions=self._scheduler.preemptions,
            prefix_queries=kv.queries,
            prefix_hits=kv.hits,
            steps=self._steps + (self._pipeline.steps if self._pipeline is not None else 0),
            phase_seconds=phases,
            drafts=self._speculator.counts() if self._speculator is not None else DraftCounts(),
        )


def _refusal(source: EngineRequest, problem: str) -> RequestOutput:
    return RequestOutput(source.request_id, [], finish_reason="error", error=problem, request_at_fault=True)
