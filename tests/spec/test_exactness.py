"""Greedy answers with drafts are those of plain decoding, whatever the draft, its length, and the cache's and the
batch's shape. In full: `pytest tests/spec/test_exactness.py -m "slow or not slow"`; a fixed sample runs by default.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from dataclasses import dataclass
from pathlib import Path

import pytest

from server.messages import DraftCounts
from tests.spec.drafts import Pair
from tests.spec.engine_harness import make_engine

DRAFTS = ("ngram", "self", "noisy", "independent", "eagle3", "mtp")
SAMPLE = 60
"""One of so many cases runs by default."""
NEW = 20


@dataclass(frozen=True)
class Case:
    draft: str
    k: int
    block_size: int
    batch: int
    chunked: bool
    hit: bool
    preempted: bool

    def __str__(self) -> str:
        flags = [name for name in ("chunked", "hit", "preempted") if getattr(self, name)]
        return "-".join([self.draft, f"k{self.k}", f"block{self.block_size}", f"batch{self.batch}", *flags])

    @property
    def sampled(self) -> bool:
        return zlib.crc32(str(self).encode()) % SAMPLE == 0


CASES = [
    Case(*values)
    for values in itertools.product(
        DRAFTS, (1, 2, 3, 5, 8), (16, 32, 64, 128, 256), (1, 4, 17), (False, True), (False, True), (False, True)
    )
]


def prompts(batch: int) -> list[list[int]]:
    """Lengths around page edges, each prompt with some repetition for ngram to find."""
    lengths = [31, 16, 17, 5, 48, 33, 15, 64, 1, 32, 47, 3, 65, 20, 49, 2, 40]
    return [[(7 * i + j * j + j % 5) % 251 if j % 7 else 9 for j in range(lengths[i])] for i in range(batch)]


@functools.cache
def plain(target: Path, batch: int) -> list[list[int]]:
    """Plain decoding, one request at a time."""
    engine = make_engine(target, enable_prefix_caching=False)
    return [engine.generate([prompt], max_tokens=NEW)[0] for prompt in prompts(batch)]


def run(pair: Pair, case: Case) -> tuple[list[list[int]], DraftCounts, int]:
    longest = max(map(len, prompts(case.batch))) + NEW
    blocks_each = -(-(longest + 9) // case.block_size)
    # With preemption: room for the longest and a little of the others.
    blocks = blocks_each + max(2, case.batch // 4) if case.preempted else blocks_each * case.batch + 4
    engine = make_engine(
        pair.target,
        pair.speculative | {"num_speculative_tokens": case.k},
        block_size=case.block_size,
        num_kv_blocks=blocks,
        max_num_batched_tokens=24 if case.chunked else 4096,
    )
    if case.hit:
        engine.generate(prompts(case.batch), max_tokens=1)
    return engine.generate(prompts(case.batch), max_tokens=NEW), engine.counts(), engine.scheduler.preemptions


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c.sampled else pytest.mark.slow, id=str(c)) for c in CASES]
)
def test_tokens_equal_plain_decoding(case: Case, pairs: dict[str, Pair]) -> None:
    pair = pairs[case.draft]
    answers, counts, _ = run(pair, case)
    assert answers == plain(pair.target, case.batch)
    assert all(accepted <= drafted for accepted, drafted in zip(counts.accepted, counts.drafted, strict=True))
    if case.draft == "self":
        assert counts.accepted == counts.drafted
        assert counts.drafted[0] > 0


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("hit", [False, True])
def test_counts_do_not_depend_on_the_block_size(draft: str, hit: bool, pairs: dict[str, Pair]) -> None:
    by_size = {}
    for size in (16, 32, 64, 128, 256):
        answers, counts, preemptions = run(pairs[draft], Case(draft, 3, size, 4, False, hit, False))
        assert preemptions == 0
        by_size[size] = (answers, counts)
    assert len({repr(value) for value in by_size.values()}) == 1, by_size


def test_drafts_of_middling_quality_are_accepted_in_part(pairs: dict[str, Pair]) -> None:
    """So that the tests above see every number of accepted tokens."""
    _, counts, _ = run(pairs["noisy"], Case("noisy", 3, 16, 17, False, False, False))
    assert all(0 < number for number in counts.lengths)


@pytest.mark.parametrize("draft", ["noisy", "eagle3", "mtp"])
def test_acceptance_after_a_prefix_hit_equals_acceptance_without(draft: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[draft]
    engine = make_engine(pair.target, pair.speculative | {"num_speculative_tokens": 3})
    first = engine.generate(prompts(4), max_tokens=NEW)
    before = engine.counts()
    recomputed = len(engine.steps)
    assert engine.generate(prompts(4), max_tokens=NEW) == first
    after = engine.counts()
    again = [b - a for a, b in zip(before.accepted, after.accepted, strict=True)]
    assert again == before.accepted
    # A hit costs at most one token more than the tokens beyond the last full block.
    for row in (row for plan in engine.steps[recomputed:] for row in plan.rows if not row.request.output):
        assert row.count <= row.request.num_prompt % 16 + 1
