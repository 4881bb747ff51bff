"""The whole engine on CUDA: captured, eager and one step after the other make the CPU's answers."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from server.config import Settings
from server.engine.in_process import Answers, InProcessEngine
from server.messages import DraftCounts, EngineRequest, SamplingParams
from tests.spec.drafts import Pair, write_pairs

DEVICE = os.environ.get("OUTRIDER_TEST_DEVICE", "cuda")
"""cpu: to see whether the tests themselves run."""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WAYS: Mapping[str, Mapping[str, Any]] = {
    "captured": {"attention_backend": "triton"},
    "eager": {"attention_backend": "triton", "enforce_eager": True},
    "torch": {"attention_backend": "torch"},
}
NEAR_TIE = 0.25
"""Log-probabilities that bf16 may turn around: each layer rounds to 1/256, and logits are sums of 32 such numbers."""

logger = logging.getLogger(__name__)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    assert not torch.backends.cuda.matmul.allow_tf32
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def start(pair: Pair, draft: Mapping[str, Any] | None, device: str = DEVICE, **settings: Any) -> InProcessEngine:
    """`draft`: settings beside the pair's own; None is no draft at all."""
    options: dict[str, Any] = {
        "model": str(pair.target),
        "device": device,
        "dtype": "float32",
        "num_kv_blocks": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        **settings,
    }
    if draft is not None:
        options["speculative"] = {"num_speculative_tokens": 3, **pair.speculative, **draft}
    return InProcessEngine(Settings.model_validate(options))


@pytest.fixture(scope="module")
def on_cpu(pairs: dict[str, Pair]) -> Callable[[str, int, int, bool], tuple[Answers, list[float]]]:
    """The CPU's answers and acceptance: pair, seed of the prompts, tokens, whether with drafts; computed once."""
    known: dict[tuple[str, int, int, bool], tuple[Answers, list[float]]] = {}

    def answers(name: str, seed: int, tokens: int, drafted: bool) -> tuple[Answers, list[float]]:
        key = (name, seed, tokens, drafted)
        if key not in known:
            engine = start(pairs[name], {} if drafted else None, "cpu")
            known[key] = engine.generate(some_prompts(8, seed), tokens), rates(engine.stats.drafts)
        return known[key]

    return answers


def some_prompts(count: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(256) for _ in range(choose.randint(1, 60))] for _ in range(count)]


def rates(counts: DraftCounts) -> list[float]:
    return [accepted / max(1, drafted) for accepted, drafted in zip(counts.accepted, counts.drafted, strict=True)]


def resolved(engine: InProcessEngine, component: str) -> str:
    return next(row.resolved for row in engine.ready.rows if (row.role, row.component) == ("target", component))


def backends(method: str, way: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of target and draft."""
    target = dict(WAYS[way])
    draft = {} if method == "ngram" else {"attention_backend": target["attention_backend"]}
    if method == "mtp":
        target["moe_backend"] = "torch"  # the one that computes in fp32 on CUDA
    return target, draft


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["none", "ngram", "self", "noisy", "eagle3", "mtp"])
def test_greedy_answers_are_the_cpus(pairs: dict[str, Pair], on_cpu: Any, method: str, way: str) -> None:
    name = "self" if method == "none" else method
    target, draft = backends(method, way)
    engine = start(pairs[name], None if method == "none" else draft, **target)
    if DEVICE == "cuda" and method != "mtp":
        assert resolved(engine, "execution") == ("cuda_graphs" if way == "captured" else "eager")
    assert engine.generate(some_prompts(8, 1), 40).token_ids == on_cpu(name, 1, 40, False)[0].token_ids
    if method == "self":
        assert rates(engine.stats.drafts) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("target", ["triton", "torch"])
@pytest.mark.parametrize("draft", ["triton", "torch"])
@pytest.mark.parametrize("method", ["noisy", "eagle3"])
def test_acceptance_by_position_is_the_same_for_all_pages_and_backends(
    pairs: dict[str, Pair], on_cpu: Any, method: str, draft: str, target: str, block_size: int
) -> None:
    answers, acceptance = on_cpu(method, 2, 60, True)
    engine = start(
        pairs[method],
        {"attention_backend": draft},
        block_size=block_size,
        num_kv_blocks={16: 64, 64: 40, 256: 30}[block_size],
        attention_backend=target,
    )
    assert engine.generate(some_prompts(8, 2), 60).token_ids == answers.token_ids
    # Captured steps may verify drafts beyond a request's end that steps one by one do not make.
    assert rates(engine.stats.drafts) == pytest.approx(acceptance, abs=0.02)


@pytest.mark.parametrize("method", ["none", "noisy", "eagle3"])
def test_requests_that_come_while_others_decode(pairs: dict[str, Pair], on_cpu: Any, method: str) -> None:
    name = "noisy" if method == "none" else method
    engine = start(pairs[name], None if method == "none" else {}, **WAYS["captured"])
    prompts = some_prompts(8, 1)
    for i, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=40, seed=i, temperature=0.0)
        engine.link.inbox.append(EngineRequest(1000 + i, prompt, params, arrived=float(i)))
        for _ in range(5):
            engine.core.round()
    while len(engine.link.ended) < len(prompts):
        engine.core.round()
    got = [[token for output in engine.link.outputs[1000 + i] for token in output.token_ids] for i in range(8)]
    assert got == on_cpu(name, 1, 40, False)[0].token_ids


@pytest.mark.parametrize("method", ["none", "noisy"])
def test_sampled_answers_do_not_depend_on_the_way(pairs: dict[str, Pair], method: str) -> None:
    prompts = some_prompts(5, seed=3)
    params: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    answers = []
    for way in ("captured", "eager"):
        engine = start(pairs["noisy"], None if method == "none" else {}, **WAYS[way])
        answers.append(engine.generate(prompts, 30, **params).token_ids)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("method", ["none", "noisy", "eagle3"])
def test_bf16_answers_part_at_near_ties_alone(pairs: dict[str, Pair], method: str) -> None:
    """Where the captured engine's answers leave the reference's own, float32 finds both tokens nearly as good.

    Scores in bf16 would not do: logits of 32 and more are multiples of 0.25 there.
    """
    name = "noisy" if method == "none" else method
    prompts = some_prompts(12, seed=5)
    captured = start(pairs[name], None if method == "none" else {}, dtype="bfloat16", **WAYS["captured"])
    reference = start(pairs[name], None, dtype="bfloat16", **WAYS["torch"])
    exact = start(pairs[name], None, dtype="float32", **WAYS["torch"])
    ours = captured.generate(prompts, 40).token_ids
    theirs = reference.generate(prompts, 40).token_ids
    for prompt, own, other in zip(prompts, ours, theirs, strict=True):
        parted = next((i for i in range(len(own)) if own[i] != other[i]), None)
        if parted is not None:
            [outputs] = exact.generate([[*prompt, *own[:parted]]], 1, logprobs=20).outputs
            [score] = outputs[0].logprobs or []
            top = dict(zip(score.top_ids, score.top_logprobs, strict=True))
            gap = max(score.logprob - top.get(token, float("-inf")) for token in (own[parted], other[parted]))
            logger.info("parted at token %d: %.4f apart", parted, gap)
            assert gap < NEAR_TIE


def test_a_step_out_of_memory_ends_its_requests_and_nothing_else(pairs: dict[str, Pair]) -> None:
    engine = start(pairs["noisy"], {}, **WAYS["captured"])
    prompts = some_prompts(3, seed=4)
    expected = engine.generate(prompts, 20).token_ids
    executor = engine.core._executor
    run = executor.execute

    def exhausted(*arguments: Any) -> Any:
        executor.execute = run  # type: ignore[method-assign]
        torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)
        return run(*arguments)

    executor.execute = exhausted  # type: ignore[method-assign]
    with pytest.raises(Exception, match="failed on a step"):
        engine.generate(prompts, 20)
    assert engine.generate(prompts, 20).token_ids == expected


@pytest.mark.skipif(DEVICE != "cuda", reason="sizes CUDA memory")
def test_the_cache_takes_its_share_of_the_memory_and_no_more(pairs: dict[str, Pair]) -> None:
    free, total = torch.cuda.mem_get_info()
    used = (total - free) / total
    share = used + 0.02
    engine = start(pairs["noisy"], {}, num_kv_blocks=None, gpu_memory_utilization=share, max_num_seqs=4096)
    assert engine.ready.kv_bytes > 0
    engine.generate(some_prompts(8, 6), 20)
    free, total = torch.cuda.mem_get_info()
    assert (total - free) / total < share + 0.01
