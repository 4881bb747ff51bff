"""The whole engine on CUDA in fp32: captured, eager and one step after the other make the CPU's answers."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from server.config import Settings
from server.engine.in_process import InProcessEngine
from server.messages import DraftCounts
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
        "max_num_seqs": 6,
        "max_num_batched_tokens": 256,
        **settings,
    }
    if draft is not None:
        options["speculative"] = {"num_speculative_tokens": 3, **pair.speculative, **draft}
    return InProcessEngine(Settings.model_validate(options))


def some_prompts(count: int, seed: int) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(256) for _ in range(choose.randint(1, 60))] for _ in range(count)]


def rates(counts: DraftCounts) -> list[float]:
    return [accepted / max(1, drafted) for accepted, drafted in zip(counts.accepted, counts.drafted, strict=True)]


def resolved(engine: InProcessEngine, component: str) -> str:
    return next(row.resolved for row in engine.ready.rows if (row.role, row.component) == ("target", component))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", ["none", "ngram", "self", "noisy", "eagle3", "mtp"])
def test_greedy_answers_are_the_cpus(pairs: dict[str, Pair], method: str, way: str) -> None:
    pair = pairs["self" if method == "none" else method]
    draft = None if method == "none" else {}
    prompts = some_prompts(9, seed=1)
    settings = dict(WAYS[way])
    if draft is not None and method != "ngram":
        draft = {"attention_backend": settings["attention_backend"]}
    if method == "mtp":
        settings["moe_backend"] = "torch"  # the one that computes in fp32 on CUDA
    expected = start(pair, None, "cpu").generate(prompts, 40).token_ids
    engine = start(pair, draft, **settings)
    if DEVICE == "cuda" and method != "mtp":
        assert resolved(engine, "execution") == ("cuda_graphs" if way == "captured" else "eager")
    assert engine.generate(prompts, 40).token_ids == expected
    if method == "self":
        assert rates(engine.stats.drafts) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("block_size", [16, 64, 256])
@pytest.mark.parametrize("target", ["triton", "torch"])
@pytest.mark.parametrize("draft", ["triton", "torch"])
@pytest.mark.parametrize("method", ["noisy", "eagle3"])
def test_acceptance_by_position_is_the_same_for_all_pages_and_backends(
    pairs: dict[str, Pair], method: str, draft: str, target: str, block_size: int
) -> None:
    prompts = some_prompts(8, seed=2)
    plain = start(pairs[method], {}, "cpu", num_kv_blocks=64)
    plain.generate(prompts, 60)
    blocks = {16: 64, 64: 40, 256: 30}[block_size]
    engine = start(
        pairs[method],
        {"attention_backend": draft},
        block_size=block_size,
        num_kv_blocks=blocks,
        attention_backend=target,
    )
    engine.generate(prompts, 60)
    assert rates(engine.stats.drafts) == pytest.approx(rates(plain.stats.drafts), abs=0.02)


@pytest.mark.parametrize("method", ["none", "noisy"])
def test_sampled_answers_do_not_depend_on_the_way(pairs: dict[str, Pair], method: str) -> None:
    pair = pairs["noisy"]
    prompts = some_prompts(5, seed=3)
    params: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7}
    answers = []
    for way in ("captured", "eager"):
        engine = start(pair, None if method == "none" else {}, **WAYS[way])
        answers.append(engine.generate(prompts, 30, **params).token_ids)
    assert answers[0] == answers[1]


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
