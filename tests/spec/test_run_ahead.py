"""Steps launched before the last one's tokens are known make the same answers and counts as steps one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch

from server.engine.graphs import Graphs, graph_sizes
from server.engine.pipeline import Pipeline
from server.engine.run_ahead import Drafting, RunAhead
from server.engine.uniform import UniformForward
from server.messages import RequestOutput
from server.spec.verify import SyntheticAcceptance
from tests.spec.drafts import Pair
from tests.spec.engine_harness import Harness, make_engine

T = TypeVar("T")
METHODS = ("none", "self", "noisy", "independent", "eagle3", "mtp")


class PaddedGraphs(Graphs):
    """Pads and repeats as captured graphs do, and captures nothing."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), enabled=False)
        self.enabled = True
        self.seen: set[Hashable] = set()

    def run(self, key: Hashable, work: Callable[[], T]) -> T:
        if key not in self.seen:
            self.seen.add(key)
            work()
        return work()


@dataclass
class Overlapping:
    """A harness whose steps overlap where they can."""

    harness: Harness
    pipeline: Pipeline
    overlapped: int = 0

    def step(self) -> bool:
        outputs: list[RequestOutput] = []
        before = self.pipeline.steps
        advanced = self.pipeline.advance(outputs, {})
        for output in outputs:
            self.harness.outputs.setdefault(output.request_id, []).append(output)
        self.overlapped += self.pipeline.steps - before
        if advanced:
            return True
        self.pipeline.interrupt()
        return self.harness.step()

    def run(self) -> None:
        for _ in range(5000):
            if not self.step():
                assert self.harness.scheduler.running == self.harness.scheduler.waiting == 0
                assert self.harness.scheduler.kv.pool.usage == 0
                return
        raise AssertionError("the engine does not come to an end")

    def generate(self, prompts: Sequence[Sequence[int]], **params: Any) -> list[list[int]]:
        ids = [self.harness.add(prompt, **params) for prompt in prompts]
        self.run()
        return [self.harness.tokens(request_id) for request_id in ids]


def overlapping(harness: Harness, graphs: Graphs | None = None) -> Overlapping:
    plan, built, settings = harness.plan, harness.built, harness.settings
    graphs = graphs or Graphs(torch.device("cpu"), enabled=False)
    drafting = None
    if plan.draft is not None and built.draft is not None:
        assert built.draft.on_device is not None
        k = plan.draft.num_tokens
        drafting = Drafting(built.draft.on_device, k, plan.draft.max_model_len, plan.draft.synthetic)
    per_step = 1 + (drafting.num_tokens if drafting else 0)
    most = min(plan.max_model_len, harness.scheduler.kv.capacity)
    width = -(-(most + 3 * per_step) // plan.block_size)
    sizes = graph_sizes(settings.max_num_seqs)
    forward = UniformForward(built.target, per_step, sizes, width, graphs)
    vocab = plan.target.layers.vocab_size
    run_ahead = RunAhead(forward, vocab, settings.max_num_seqs, width, drafting, graphs)
    if graphs.enabled:
        run_ahead.capture(max(sizes))
    speculator = built.draft.speculator if built.draft else None
    return Overlapping(harness, Pipeline(run_ahead, harness.scheduler, speculator, "failed"))


def engine(pairs: dict[str, Pair], method: str, speculative: dict[str, Any] | None = None, **settings: Any) -> Harness:
    pair = pairs["self" if method == "none" else method]
    own = {"num_speculative_tokens": 3, **pair.speculative, **(speculative or {})}
    options = {"max_num_seqs": 4, **settings}
    return make_engine(pair.target, None if method == "none" else own, **options)


def some_prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(256) for _ in range(choose.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("method", METHODS)
def test_answers_and_counts_are_those_of_steps_one_by_one(pairs: dict[str, Pair], method: str) -> None:
    prompts = some_prompts(6)
    plain = engine(pairs, method)
    expected = plain.generate(prompts, max_tokens=40)
    own = overlapping(engine(pairs, method))
    assert own.generate(prompts, max_tokens=40) == expected
    assert own.overlapped > 10
    counts, theirs = own.harness.counts(), plain.counts()
    # The last step of a request may verify drafts beyond its end, which steps one by one do not make.
    assert counts.accepted[:1] == theirs.accepted[:1] or method == "noisy"
    for accepted, drafted, other, others in zip(
        counts.accepted, counts.drafted, theirs.accepted, theirs.drafted, strict=True
    ):
        assert accepted / max(drafted, 1) == pytest.approx(other / max(others, 1), abs=0.1)


@pytest.mark.slow  # kernels in the interpreter
@pytest.mark.parametrize("method", ["none", "eagle3"])
def test_rows_of_padding_change_nothing(pairs: dict[str, Pair], method: str) -> None:
    pytest.importorskip("triton")
    prompts = some_prompts(3, longest=10)
    expected = engine(pairs, method).generate(prompts, max_tokens=5)
    backend = {"attention_backend": "triton"}
    harness = engine(pairs, method, backend if method != "none" else None, max_num_seqs=4, **backend)
    own = overlapping(harness, PaddedGraphs())
    assert own.generate(prompts, max_tokens=5) == expected
    assert own.overlapped


@pytest.mark.parametrize("method", ["none", "noisy"])
def test_requests_that_come_and_go(pairs: dict[str, Pair], method: str) -> None:
    """Arrivals interrupt, stop ids end sequences a step late, aborted ones vanish; nothing leaks into the others."""
    prompts = some_prompts(8, seed=1)
    plain = engine(pairs, method)
    expected = plain.generate(prompts, max_tokens=60)
    stops = [answer[20] for answer in expected]
    harness = engine(pairs, method)
    own = overlapping(harness)
    aborted = harness.add([1, 2, 3], max_tokens=100)
    ids = []
    for prompt, stop in zip(prompts, stops, strict=True):
        ids.append(harness.add(prompt, max_tokens=60, stop_token_ids=(stop,)))
        for _ in range(7):
            own.step()
        if len(ids) == 5:
            harness.scheduler.abort([aborted])
            harness.scheduler.check()
    own.run()
    harness.scheduler.check()
    for request_id, answer, stop in zip(ids, expected, stops, strict=True):
        assert harness.tokens(request_id) == answer[: answer.index(stop) + 1]
        assert harness.finish(request_id) == "stop"
    assert own.overlapped


def test_a_pool_that_is_too_small_falls_back_to_planning(pairs: dict[str, Pair]) -> None:
    prompts = some_prompts(5, seed=2)
    expected = engine(pairs, "noisy").generate(prompts, max_tokens=50)
    own = overlapping(engine(pairs, "noisy", num_kv_blocks=9, max_model_len=120))
    assert own.generate(prompts, max_tokens=50) == expected
    assert own.harness.scheduler.preemptions


def test_sampled_answers_are_the_same(pairs: dict[str, Pair]) -> None:
    prompts = some_prompts(4, seed=3)
    options: dict[str, Any] = {"max_tokens": 30, "temperature": 0.9, "top_p": 0.9}
    expected = engine(pairs, "none").generate(prompts, **options)
    own = overlapping(engine(pairs, "none"))
    assert own.generate(prompts, **options) == expected
    assert own.overlapped > 10


@pytest.mark.parametrize(
    "params", [{"logprobs": 1}, {"repetition_penalty": 1.2}, {"temperature": 1.0}, {"bad_words": ((3,),)}], ids=str
)
def test_what_only_the_host_can_choose_is_left_to_it(pairs: dict[str, Pair], params: dict[str, Any]) -> None:
    prompts = some_prompts(2, seed=4)
    expected = engine(pairs, "noisy").generate(prompts, max_tokens=12, **params)
    own = overlapping(engine(pairs, "noisy"))
    assert own.generate(prompts, max_tokens=12, **params) == expected
    assert own.overlapped == 0


def test_min_tokens_is_the_hosts_until_it_is_reached(pairs: dict[str, Pair]) -> None:
    (answer,) = engine(pairs, "none").generate([[5, 6, 7]], max_tokens=40)
    params: dict[str, Any] = {"max_tokens": 40, "min_tokens": 12, "stop_token_ids": (answer[4],)}
    expected = engine(pairs, "none").generate([[5, 6, 7]], **params)
    own = overlapping(engine(pairs, "none"))
    assert own.generate([[5, 6, 7]], **params) == expected
    assert own.overlapped


def test_acceptance_by_lot_is_the_same(pairs: dict[str, Pair]) -> None:
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    prompts = some_prompts(4, seed=5)
    plain = engine(pairs, "eagle3", synthetic)
    plain.generate(prompts, max_tokens=60)
    own = overlapping(engine(pairs, "eagle3", synthetic))
    own.generate(prompts, max_tokens=60)
    drafts = sum(own.harness.counts().lengths)
    length = 1 + sum(own.harness.counts().accepted) / drafts
    assert length == pytest.approx(1 + sum(plain.counts().accepted) / sum(plain.counts().lengths), abs=0.2)


def test_lots_depend_on_seed_and_position_alone() -> None:
    lots = SyntheticAcceptance((0.7, 0.7, 0.7))
    together = lots.accepted([1, 2, 3], [10, 20, 30], [3, 3, 3])
    assert together == [lots.accepted([s], [p], [3])[0] for s, p in ((1, 10), (2, 20), (3, 30))]
    assert lots.accepted([1, 2, 3], [10, 20, 30], [0, 2, 1]) == [0, min(together[1], 2), min(together[2], 1)]
    assert lots.accepted([], [], []) == []


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (3, [3, 2, 1]), (128, [128, 96, 64, 48, 32, 24, 16, 8, 4, 2, 1])]
)
def test_graph_sizes(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes
