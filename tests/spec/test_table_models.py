"""Drafts whose acceptance is known as an exact count for every position, whatever the cache's and the batch's shape.

In full: `pytest tests/spec/test_table_models.py -m "slow or not slow"`; a fixed sample runs by default.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from server.engine.attention.base import KernelPages
from server.engine.attention.torch import TorchAttention
from tests.spec.drafts import Pair
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.table_models import VOCAB, Table, table, write_table_eagle3, write_table_glm, write_table_target
from tests.spec.test_run_ahead import overlapping

METHODS = ("draft_model", "eagle3", "mtp")
NEAR, FAR = 2, 260
"""Slots back: within what a draft has just written, and beyond a page of any size."""
WRONG = ((3, 9, 27, 30), tuple(range(8, 24)), (), tuple(range(0, 64, 2)), (5,))
"""By depth: the tokens whose entries are false."""
UNKNOWN = (11, 12, 40)
"""What the EAGLE-3 head cannot draft."""
K = 5
NEW = 40
SAMPLE = 14
"""One of so many cases runs by default."""


@dataclass(frozen=True)
class Draft:
    """What is known about a draft."""

    method: str
    rule: Table
    pair: Pair

    def is_right(self, depth: int, before: Sequence[int]) -> bool:
        """Whether its token at a depth is the target's, after the right tokens."""
        decides = before[-1 - self.rule.back]
        if self.method == "draft_model":
            return decides not in WRONG[1]
        wrong = WRONG[depth] if depth < len(WRONG) else ()
        return decides not in wrong and not (self.method == "eagle3" and self.rule.entry[decides] in UNKNOWN)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Draft]:
    found = {}
    for back in (NEAR, FAR):
        folder, rule = tmp_path_factory.mktemp(f"table-{back}"), table(back)
        target = write_table_target(folder / "target", rule)
        corrupted = write_table_target(folder / "draft", rule, wrong=WRONG[1])
        head = write_table_eagle3(folder / "eagle3", rule, WRONG, unknown=UNKNOWN)
        glm = write_table_glm(folder / "glm", rule, WRONG)
        pairs = {
            "draft_model": Pair(target, {"method": "draft_model", "model": str(corrupted)}),
            "eagle3": Pair(target, {"method": "eagle3", "model": str(head)}),
            "mtp": Pair(glm, {"method": "mtp"}),
        }
        found |= {(method, back): Draft(method, rule, pair) for method, pair in pairs.items()}
    return found


@dataclass(frozen=True)
class Case:
    method: str
    back: int
    block_size: int
    shape: str

    def __str__(self) -> str:
        return f"{self.method}-back{self.back}-block{self.block_size}-{self.shape}"

    @property
    def sampled(self) -> bool:
        return zlib.crc32(str(self).encode()) % SAMPLE == 0


CASES = [
    Case(*values)
    for values in itertools.product(
        METHODS, (NEAR, FAR), (16, 32, 64, 128, 256), ("whole", "chunked", "hit", "preempted", "all", "ahead")
    )
]


def prompts(rule: Table, count: int = 6) -> list[list[int]]:
    """Random tokens that the rule continues.

    All slots that decide on an answer hold tokens that follow the rule: others do not fit their hidden states.
    """
    generator = torch.Generator().manual_seed(rule.back)
    begun = [torch.randint(VOCAB, (rule.back + 1,), generator=generator).tolist() for _ in range(count)]
    lengths = (rule.back + 1 + extra for extra in (0, 1, 14, 7, 30, 21))
    return [[*tokens, *rule.continued(tokens, length)] for tokens, length in zip(begun, lengths, strict=False)]


def engine_for(case: Case, draft: Draft, longest: int) -> Harness:
    """For the sample's prompts, the longest of so many tokens."""
    blocks_each = -(-(longest + NEW) // case.block_size)
    two_prompts = 2 * -(-longest // case.block_size)
    preempted = case.shape in ("preempted", "all")
    return make_engine(
        draft.pair.target,
        draft.pair.speculative | {"num_speculative_tokens": K},
        block_size=case.block_size,
        num_kv_blocks=max(blocks_each, two_prompts) + 1 if preempted else 8 * blocks_each,
        max_num_batched_tokens=48 if case.shape in ("chunked", "all") else 8192,
    )


def marks(case: Case) -> tuple[pytest.MarkDecorator, ...]:
    return () if case.sampled else (pytest.mark.slow,)


@pytest.mark.parametrize("case", [pytest.param(c, marks=marks(c), id=str(c)) for c in CASES])
def test_every_draft_comes_to_what_its_table_says(case: Case, drafts: dict[tuple[str, int], Draft]) -> None:
    draft = drafts[case.method, case.back]
    asked = prompts(draft.rule)
    engine = engine_for(case, draft, max(map(len, asked)))
    if case.shape in ("hit", "all"):
        ids = [engine.add(prompt, max_tokens=3) for prompt in asked]
        engine.run()
        check_drafts(engine, draft, ids)
    ids = [engine.add(prompt, max_tokens=NEW) for prompt in asked]
    if case.shape == "ahead":
        ahead = overlapping(engine)
        ahead.run()
        assert ahead.overlapped
    else:
        engine.run()
    assert [engine.tokens(i) for i in ids] == [draft.rule.continued(prompt, NEW) for prompt in asked]
    check_drafts(engine, draft, ids)
    check_counters(engine)
    if case.shape in ("whole", "hit"):
        for request_id, prompt in zip(ids, asked, strict=True):
            assert verified(engine, request_id) == expected(draft, prompt)
    if case.shape == "preempted" and case.block_size == 16:
        assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("pages", ["one page a block", "pages of 64 at most"])
@pytest.mark.parametrize("method", METHODS)
def test_counters_are_these_numbers_at_every_block_size(
    method: str, pages: str, drafts: dict[tuple[str, int], Draft], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written down once, so that a mistake of the oracle above would show."""
    if pages == "pages of 64 at most":
        monkeypatch.setattr(TorchAttention, "kernel_pages", KernelPages(sizes=frozenset({16, 32, 64})))
    sizes = (16, 256) if pages == "one page a block" else (128, 256)
    found = []
    for block_size in sizes:
        draft = drafts[method, FAR]
        asked = prompts(draft.rule)
        engine = engine_for(Case(method, FAR, block_size, "whole"), draft, max(map(len, asked)))
        assert engine.built.target.pages.page_size == (block_size if pages == "one page a block" else 64)
        engine.generate(asked, max_tokens=NEW)
        found.append((engine.counts().drafted, engine.counts().accepted))
    assert found == [KNOWN[method]] * len(sizes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block_size", [16, 32])
def test_a_prefix_hit_whose_next_token_is_another_one(
    method: str, block_size: int, drafts: dict[tuple[str, int], Draft]
) -> None:
    """A head's last slot in the shared block was made from the token that followed then."""
    draft = drafts[method, NEAR]
    prompt = prompts(draft.rule, 1)[0]
    prompt += draft.rule.continued(prompt, 2 * block_size + 1 - len(prompt))
    engine = engine_for(Case(method, NEAR, block_size, "whole"), draft, len(prompt))
    engine.generate([[*prompt[:-1], (prompt[-1] + 1) % VOCAB]], max_tokens=2)
    request_id = engine.add(prompt, max_tokens=NEW)
    engine.run()
    assert engine.outputs[request_id][0].cached_tokens == 2 * block_size - (method != "draft_model")
    assert engine.tokens(request_id) == draft.rule.continued(prompt, NEW)
    assert verified(engine, request_id) == expected(draft, prompt)


KNOWN = {
    "draft_model": ([70, 67, 66, 66, 64], [54, 38, 30, 23, 16]),
    "eagle3": ([59, 57, 55, 53, 52], [58, 42, 38, 18, 17]),
    "mtp": ([55, 54, 52, 52, 49], [55, 42, 41, 21, 18]),
}
"""Drafted and accepted by position."""


def verified(engine: Harness, request_id: int) -> list[tuple[int, int]]:
    """(drafted, accepted) of each step that verified a draft."""
    return [(output.drafted, output.accepted) for output in engine.outputs[request_id] if output.drafted]


def check_drafts(engine: Harness, draft: Draft, ids: Sequence[int]) -> None:
    """Each draft, wherever it began, was accepted as far as the tables say, and did not count beyond its end."""
    for request_id in ids:
        outputs = engine.outputs[request_id]
        (request,) = {row.request for plan in engine.steps for row in plan.rows if row.request.request_id == request_id}
        at = request.num_prompt
        for output in outputs:
            if output.drafted:
                right = [draft.is_right(depth, request.tokens[: at + depth]) for depth in range(output.drafted)]
                assert output.accepted == (right.index(False) if False in right else len(right))
                assert output.drafted <= min(K, request.max_len - at)
            at += len(output.token_ids)


def check_counters(engine: Harness) -> None:
    """The counters are the sum of what the requests were told."""
    events = [(o.drafted, o.accepted) for outputs in engine.outputs.values() for o in outputs if o.drafted]
    counts = engine.counts()
    assert counts.drafted == [sum(drafted > i for drafted, _ in events) for i in range(K)]
    assert counts.accepted == [sum(accepted > i for _, accepted in events) for i in range(K)]
    assert counts.lengths == [sum(accepted == i for _, accepted in events) for i in range(K + 1)]


def expected(draft: Draft, prompt: Sequence[int]) -> list[tuple[int, int]]:
    """The verifications of a request that always gets the drafts it wants."""
    tokens = [*prompt, *draft.rule.continued(prompt, NEW)]
    at, events = len(prompt) + 1, []  # the first token comes without a draft
    while at < len(tokens):
        drafted = min(K, len(tokens) - at - 1)
        right = [draft.is_right(depth, tokens[: at + depth]) for depth in range(drafted)]
        accepted = right.index(False) if False in right else drafted
        if drafted:
            events.append((drafted, accepted))
        at += accepted + 1
    return events
