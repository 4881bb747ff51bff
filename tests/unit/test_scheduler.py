"""The scheduler against a cache that remembers which token was written where.

The next token is a digest of everything the block table shows, so a wrong block, a stale copy, a lost token or a prefix
hit on something else changes the answer. The oracle computes the same digest from the tokens alone.
"""

import itertools
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.kv.cache import KVCache
from server.engine.request import Draft, Request
from server.engine.sampling.request import RequestSampling
from server.engine.scheduler import Scheduler, SchedulerLimits
from server.engine.step import DraftRow, RowResult, StepPlan
from server.messages import EngineRequest, RequestOutput, SamplingParams
from server.spec.verify import confirmed

VOCAB = 50
BLOCK = 4


def digest(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def oracle(prompt: list[int], max_tokens: int, max_len: int, stop: int | None) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, max_len):
        tokens.append(digest(tokens))
        if tokens[-1] == stop:
            break
    return tokens[len(prompt) :]


class RememberingCache:
    """What the device would hold: per slot the token written there, and nothing else."""

    def __init__(self, blocks: int) -> None:
        self.slots: list[list[int | None]] = [[None] * BLOCK for _ in range(blocks)]

    def execute(self, plan: StepPlan) -> list[RowResult]:
        copied = [list(self.slots[copy.source]) for copy in plan.copies]
        for copy, content in zip(plan.copies, copied, strict=True):
            self.slots[copy.target] = content
        results = []
        for row in plan.rows:
            for position, token in zip(range(row.start, row.end), row.token_ids, strict=True):
                self.slots[row.request.blocks[position // BLOCK]][position % BLOCK] = token
        for row in plan.rows:
            seen = [self.slots[row.request.blocks[p // BLOCK]][p % BLOCK] for p in range(row.end)]
            known = row.end - len(row.drafts)
            assert seen == [*row.request.tokens[:known], *row.drafts]
            tokens = [token for token in seen if token is not None]
            sampled = [digest(tokens[:end]) for end in range(known, row.end + 1)] if row.samples else []
            results.append(RowResult(tuple(confirmed(row.drafts, sampled))))
        return results


def draft(row: DraftRow, quality: int) -> Draft:
    """Right tokens, but for one in `quality` of them."""
    tokens = list(row.request.tokens)
    for _ in range(row.limit):
        tokens.append(digest(tokens) if len(tokens) % quality else VOCAB - 1)
    return Draft(tuple(tokens[len(row.request.tokens) :]))


class Engine:
    def __init__(
        self, blocks: int = 9, seqs: int = 4, budget: int = 8, chunked: bool = True, k: int = 0, **options: bool
    ) -> None:
        self.kv = KVCache(blocks, BLOCK, options.get("prefix", True), options.get("ahead", False))
        self.k = k
        self.quality = 3
        limits = SchedulerLimits(seqs, budget, chunked, options.get("priority", False))
        self.ticks = itertools.count()
        self.scheduler = Scheduler(limits, self.kv, clock=lambda: float(next(self.ticks)))
        self.cache = RememberingCache(blocks)
        self.budget = budget
        self.seqs = seqs
        self.plans: list[StepPlan] = []
        self.outputs: dict[int, list[RequestOutput]] = {}

    def add(self, request_id: int, prompt: list[int], max_tokens: int = 5, **options: object) -> Request:
        params = SamplingParams(
            max_tokens=max_tokens,
            seed=0,
            stop_token_ids=options.pop("stop", ()),  # type: ignore[arg-type]
            prompt_logprobs=options.pop("prompt_logprobs", None),  # type: ignore[arg-type]
        )
        source = EngineRequest(request_id, prompt, params, arrived=float(request_id), **options)  # type: ignore[arg-type]
        request = Request(
            source,
            RequestSampling(params, prompt, VOCAB),
            min(len(prompt) + max_tokens, self.kv.capacity),
            list(prompt),
        )
        self.scheduler.add(request)
        return request

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        if plan is None:
            return False
        assert plan.num_tokens <= self.budget
        assert len(plan.rows) <= self.seqs
        assert all(row.count >= 1 for row in plan.rows)
        self.plans.append(plan)
        for output in self.scheduler.commit(plan, self.cache.execute(plan)):
            self.outputs.setdefault(output.request_id, []).append(output)
        rows = self.scheduler.draft_rows(plan, lambda request: self.k)
        self.scheduler.check()
        for row in rows:
            assert row.limit <= self.k
            if row.limit:  # room for every drafted token
                assert len(row.request.blocks) * BLOCK >= len(row.request.tokens) + row.limit
        self.scheduler.settle(plan, rows, [draft(row, self.quality) for row in rows])
        self.scheduler.check()
        return True

    def run(self) -> None:
        for _ in range(3000):
            if not self.step():
                assert self.scheduler.running == self.scheduler.waiting == 0
                assert self.kv.pool.usage == 0
                return
        raise AssertionError("the engine does not come to an end")

    def tokens(self, request_id: int) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]


def test_one_request() -> None:
    engine = Engine()
    engine.add(1, [1, 2, 3])
    engine.run()
    assert engine.tokens(1) == oracle([1, 2, 3], 5, 32, None)
    assert [output.finish_reason for output in engine.outputs[1]] == [None] * 4 + ["length"]


def test_a_long_prompt_goes_in_chunks_beside_decodes() -> None:
    engine = Engine(blocks=20, budget=6)
    engine.add(1, [1, 2], max_tokens=12)
    engine.step()
    engine.add(2, list(range(20)))
    engine.step()
    assert [(row.request.request_id, row.count) for row in engine.plans[-1].rows] == [(1, 1), (2, 5)]
    engine.run()
    assert engine.tokens(1) == oracle([1, 2], 12, 76, None)
    assert engine.tokens(2) == oracle(list(range(20)), 5, 76, None)


def test_without_chunks_a_prompt_waits_for_a_step_of_its_own_size() -> None:
    engine = Engine(blocks=20, budget=10, chunked=False)
    engine.add(1, [1, 2, 3, 4])
    engine.add(2, list(range(8)))
    engine.run()
    assert [[row.count for row in plan.rows] for plan in engine.plans[:2]] == [[4], [1, 8]]


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_prompt_seen_before_costs_what_lies_beyond_its_full_blocks_and_at_least_one_token(length: int) -> None:
    engine = Engine()
    prompt = list(range(length))
    engine.add(1, prompt)
    engine.run()
    engine.add(2, prompt)
    engine.step()
    full = length // BLOCK * BLOCK
    expected = full - 1 if full == length else full
    assert engine.plans[-1].rows[0].start == expected
    engine.run()
    assert engine.tokens(2) == engine.tokens(1)
    assert engine.outputs[2][0].cached_tokens == expected


def test_a_hit_on_a_block_in_use_does_not_write_into_it() -> None:
    engine = Engine()
    first = engine.add(1, list(range(BLOCK)), max_tokens=8)
    engine.step()
    second = engine.add(2, list(range(BLOCK)), max_tokens=8)
    engine.step()
    assert first.blocks[0] != second.blocks[0]
    engine.run()
    assert engine.tokens(1) == engine.tokens(2)


def test_salts_and_prompt_logprobs_find_nothing() -> None:
    engine = Engine(blocks=30)
    prompt = list(range(9))
    engine.add(1, prompt)
    engine.run()
    engine.add(2, prompt, cache_salt="other")
    engine.add(3, prompt, prompt_logprobs=0)
    engine.run()
    assert engine.outputs[2][0].cached_tokens == engine.outputs[3][0].cached_tokens == 0


def test_prefix_caching_can_be_off() -> None:
    engine = Engine(prefix=False)
    for request_id in (1, 2):
        engine.add(request_id, list(range(9)))
        engine.run()
    assert engine.outputs[2][0].cached_tokens == 0
    assert (engine.kv.queries, engine.kv.hits) == (0, 0)


def test_a_pool_for_two_makes_the_third_wait_or_give_way_and_all_end_right() -> None:
    engine = Engine(blocks=8, seqs=6, budget=16)
    prompts = {i: [i, i + 1, i + 2] for i in range(6)}
    for i, prompt in prompts.items():
        engine.add(i, prompt, max_tokens=18)
    engine.run()
    assert engine.scheduler.preemptions > 0
    for i, prompt in prompts.items():
        assert engine.tokens(i) == oracle(prompt, 18, 28, None)


def test_the_whole_pool_is_enough_for_one() -> None:
    engine = Engine(blocks=5)
    engine.add(1, [1, 2, 3], max_tokens=1000)
    engine.run()
    assert len(engine.tokens(1)) == 4 * BLOCK - 3
    assert engine.outputs[1][-1].finish_reason == "length"


def test_priority_goes_first_and_gives_way_last() -> None:
    engine = Engine(seqs=1, priority=True)
    engine.add(1, [1], priority=5)
    engine.add(2, [2], priority=-5)
    engine.run()
    assert engine.plans[0].rows[0].request.request_id == 2


def test_first_come_first_served_ignores_priority() -> None:
    engine = Engine(seqs=1)
    engine.add(1, [1], priority=5)
    engine.add(2, [2], priority=-5)
    engine.run()
    assert engine.plans[0].rows[0].request.request_id == 1


def test_stop_ids_end_a_sequence_and_are_delivered() -> None:
    free = oracle([7, 7], 10, 32, None)
    engine = Engine()
    engine.add(1, [7, 7], max_tokens=10, stop=(free[3],))
    engine.run()
    assert engine.tokens(1) == oracle([7, 7], 10, 32, free[3])
    assert engine.outputs[1][-1].finish_reason == "stop"
    assert engine.outputs[1][-1].stop_token_id == free[3]


def test_scoring_alone_ends_without_a_token() -> None:
    engine = Engine()
    engine.add(1, [1, 2, 3], max_tokens=0)
    engine.run()
    assert engine.tokens(1) == []
    assert engine.outputs[1][-1].finish_reason == "length"


def test_a_failed_step_ends_its_requests_and_no_other() -> None:
    engine = Engine(seqs=1)
    engine.add(1, [1, 2])
    engine.add(2, [3, 4])
    plan = engine.scheduler.schedule()
    assert plan is not None
    (output,) = engine.scheduler.fail(plan, "no luck")
    assert (output.request_id, output.finish_reason, output.error) == (1, "error", "no luck")
    engine.run()
    assert engine.tokens(2) == oracle([3, 4], 5, 32, None)


def test_a_block_found_is_copied_when_its_last_entry_looks_ahead() -> None:
    engine = Engine(ahead=True)
    engine.add(1, list(range(BLOCK + 2)))
    engine.run()
    engine.add(2, list(range(BLOCK + 2)))
    engine.step()
    assert engine.plans[-1].rows[0].start == BLOCK - 1
    assert len(engine.plans[-1].copies) == 1
    engine.run()
    assert engine.tokens(2) == engine.tokens(1)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_counts_of_a_perfect_draft_are_equal_whatever_ends_the_answer(max_tokens: int) -> None:
    engine = Engine(k=5)
    engine.quality = 1000
    engine.add(1, [1, 2, 3], max_tokens)
    engine.run()
    assert engine.tokens(1) == oracle([1, 2, 3], max_tokens, 32, None)
    drafted = sum(output.drafted for output in engine.outputs[1])
    assert drafted == sum(output.accepted for output in engine.outputs[1])
    assert drafted + len(engine.outputs[1]) == max_tokens


def test_a_stop_inside_an_accepted_run_ends_there_and_the_rest_counts_for_nothing() -> None:
    free = oracle([1, 2, 3], 12, 32, None)
    engine = Engine(k=7)
    engine.quality = 1000
    engine.add(1, [1, 2, 3], 12, stop=(free[4],))
    engine.run()
    assert engine.tokens(1) == free[:5]
    last = engine.outputs[1][-1]
    assert (last.finish_reason, last.stop_token_id) == ("stop", free[4])
    assert (last.drafted, last.accepted) == (4, 4)


def test_drafts_never_take_another_request_out_of_the_step() -> None:
    engine = Engine(blocks=40, seqs=4, budget=6, k=5)
    for i in range(4):
        engine.add(i, [i], max_tokens=8)
    engine.run()
    full = [plan for plan in engine.plans if sum(row.request.remaining == 1 for row in plan.rows) == 4]
    assert all(plan.num_tokens <= 6 for plan in full)
    assert any(row.drafts for plan in engine.plans for row in plan.rows)
    for i in range(4):
        assert engine.tokens(i) == oracle([i], 8, 156, None)


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt length
        st.integers(0, 14),  # max_tokens
        st.integers(0, 3),  # which of a few prefixes
        st.integers(0, 12),  # arrives at this step
        st.one_of(st.none(), st.integers(0, 25)),  # aborted at this step
        st.integers(-1, 1),  # priority
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150, deadline=None)
@given(
    REQUESTS,
    st.integers(9, 20),
    st.integers(1, 6),
    st.integers(1, 24),
    st.integers(0, 6),
    st.integers(2, 9),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_any_load_gives_each_request_its_own_answer(
    requests: list[tuple[int, int, int, int, int | None, int]],
    blocks: int,
    seqs: int,
    budget: int,
    k: int,
    quality: int,
    options: tuple[bool, bool, bool],
) -> None:
    prefix, priority, ahead = options
    engine = Engine(blocks=blocks, seqs=seqs, budget=budget, k=k, prefix=prefix, priority=priority, ahead=ahead)
    engine.quality = quality
    prompts = {i: [which + p % 7 for p in range(length)] for i, (length, _, which, *_) in enumerate(requests)}
    for tick in range(26):
        for i, (_, max_tokens, _, arrival, _, rank) in enumerate(requests):
            if arrival == tick:
                engine.add(i, prompts[i], max_tokens, priority=rank)
        engine.scheduler.abort(i for i, request in enumerate(requests) if request[4] == tick)
        engine.scheduler.check()
        engine.step()
    engine.run()
    for i, (length, max_tokens, *_, aborted, _) in enumerate(requests):
        want = oracle(prompts[i], max_tokens, engine.kv.capacity, None)
        got = engine.tokens(i) if i in engine.outputs else []
        if aborted is None or (engine.outputs.get(i) and engine.outputs[i][-1].finish_reason):
            assert got == want, (length, max_tokens)
        else:
            assert got == want[: len(got)]
