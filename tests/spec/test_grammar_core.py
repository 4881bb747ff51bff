"""The engine's loop compiles grammars beside itself: requests wait for theirs, others go on, a bad one ends alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from server.engine.core import EngineCore
from server.engine.grammar_compile import GrammarCompiler
from server.engine.grammar_vocabulary import GrammarVocabulary
from server.messages import Abort, EngineOutputs, EngineRequest, Grammar, RequestOutput, SamplingParams
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.tiny_models import write_llama

ABC = Grammar("regex", "(abc){4}")


@dataclass
class Link:
    """Both ends of the engine's link."""

    waiting: list[EngineRequest | Abort] = field(default_factory=list)
    outputs: dict[int, list[RequestOutput]] = field(default_factory=dict)
    last: EngineOutputs | None = None

    def send(self, message: object) -> None:
        assert isinstance(message, EngineOutputs)
        self.last = message
        for output in message.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def receive(self, wait_seconds: float) -> list[EngineRequest | Abort]:
        messages, self.waiting = self.waiting, []
        return messages

    def ended(self, request_id: int) -> bool:
        outputs = self.outputs.get(request_id, [])
        return bool(outputs) and outputs[-1].finish_reason is not None


@dataclass
class Running:
    """An engine whose vocabulary is only made when the gate is open."""

    engine: Harness
    link: Link
    core: EngineCore
    gate: threading.Event
    made: list[int]

    def ask(self, request_id: int, grammar: Grammar | None) -> None:
        params = SamplingParams(max_tokens=20, seed=request_id, temperature=0.0, grammar=grammar)
        self.link.waiting.append(EngineRequest(request_id, [5, 6, 7], params, arrived=float(request_id)))

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(200_000):
            if condition():
                return
            with torch.inference_mode():
                self.core.round()
        raise AssertionError("it never happened")

    def finish(self, request_id: int) -> tuple[str | None, int]:
        outputs = self.link.outputs[request_id]
        return outputs[-1].finish_reason, sum(len(output.token_ids) for output in outputs)


@pytest.fixture
def running(tmp_path: Path) -> Running:
    engine = make_engine(write_llama(tmp_path / "model"))
    link, gate, made = Link(), threading.Event(), []

    def vocabulary() -> GrammarVocabulary:
        assert gate.wait(60)
        made.append(1)
        return engine.vocabulary

    core = EngineCore(
        link,  # type: ignore[arg-type]
        engine.scheduler,
        engine.executor,
        None,
        GrammarCompiler(vocabulary),
        260,
        260,
        64,
    )
    return Running(engine, link, core, gate, made)


def test_requests_wait_for_their_grammar_and_others_go_on(running: Running) -> None:
    running.ask(1, ABC)
    running.ask(2, None)
    running.ask(3, ABC)
    running.until(lambda: running.link.ended(2))
    assert running.finish(2) == ("length", 20)
    assert 1 not in running.link.outputs
    assert running.link.last is not None and running.link.last.stats.waiting == 2
    running.gate.set()
    running.until(lambda: running.link.ended(1) and running.link.ended(3))
    assert running.finish(1) == running.finish(3) == ("stop", 12)
    assert running.link.last.stats.waiting == running.link.last.stats.running == 0
    running.ask(4, ABC)
    running.until(lambda: running.link.ended(4))
    assert running.finish(4) == ("stop", 12)
    assert len(running.made) == 1
    assert running.engine.scheduler.kv.pool.usage == 0


def test_a_grammar_that_cannot_be_compiled_ends_its_own_requests(running: Running) -> None:
    running.gate.set()
    running.ask(1, Grammar("regex", "(("))
    running.ask(2, ABC)
    running.ask(3, Grammar("lark", "start: nobody"))
    running.until(lambda: all(map(running.link.ended, (1, 2, 3))))
    assert running.finish(1) == running.finish(3) == ("error", 0)
    error = running.link.outputs[1][-1].error
    assert error is not None and "cannot be compiled" in error
    assert running.finish(2) == ("stop", 12)


def test_a_request_may_be_aborted_while_it_waits(running: Running) -> None:
    running.ask(1, ABC)
    running.until(lambda: running.link.last is not None and running.link.last.stats.waiting == 1)
    running.link.waiting.append(Abort([1, 99]))
    running.gate.set()
    running.ask(2, ABC)
    running.until(lambda: running.link.ended(2))
    assert 1 not in running.link.outputs
    assert running.link.last is not None and running.link.last.stats.waiting == 0
