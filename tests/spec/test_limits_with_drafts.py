"""What bounds a draft: the context, the draft's own positions, the step's tokens, the blocks, schedules and requests.

Cases b19, b20, b21, b23, b24; whatever the bound, answers are those of plain decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.engine.step import StepRow
from server.spec.best_length import BestLength
from tests.spec.drafts import Pair
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.tiny_models import config_of, tensors_of, write_folder

NEURAL = ("self", pytest.param("noisy", marks=pytest.mark.slow), "eagle3", "mtp")
DRAFTS = ("ngram", *NEURAL)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """With repetition, so that ngram has something to find."""
    return [(11 * seed + 7 * i + (i % 4) * (i // 9)) % 251 if i % 6 else 9 for i in range(length)]


@functools.cache
def plain_engine(target: Path) -> Harness:
    """Plain decoding, with blocks for everything at once."""
    return make_engine(target, enable_prefix_caching=False, num_kv_blocks=400)


def speculating(pair: Pair, k: int, more: dict[str, Any] | None = None, **settings: Any) -> Harness:
    return make_engine(pair.target, pair.speculative | {"num_speculative_tokens": k} | (more or {}), **settings)


def check_answers(engine: Harness, target: Path, asked: dict[int, tuple[Sequence[int], int]]) -> None:
    plain = plain_engine(target)
    known = {request_id: plain.add(prompt, max_tokens=count) for request_id, (prompt, count) in asked.items()}
    plain.run()
    assert {i: engine.tokens(i) for i in known} == {i: plain.tokens(j) for i, j in known.items()}


def drafting_rows(engine: Harness) -> list[StepRow]:
    return [row for plan in engine.steps for row in plan.rows if row.drafts]


@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_end_at_the_context_limit(draft: str, pairs: dict[str, Pair]) -> None:
    """Case b19: with k = 8, prompts that leave 1 to 10 places and a block's last ones."""
    limit, pair = 64, pairs[draft]
    engine = speculating(pair, 8, max_model_len=limit, num_kv_blocks=80)
    asked = {}
    for length in (*range(limit - 10, limit), 48, 47, 31):
        prompt = prompt_of(length)
        asked[engine.add(prompt, max_tokens=1000)] = (prompt, limit - length)
    engine.run()
    check_answers(engine, pair.target, asked)
    assert all(engine.finish(i) == "length" for i in asked)
    assert max(row.end for plan in engine.steps for row in plan.rows) < limit
    if draft == "self":
        assert engine.counts().accepted == engine.counts().drafted


@pytest.mark.parametrize(
    ("draft", "source"),
    # An MTP layer's config is its target's.
    [("self", "named"), ("eagle3", "named"), ("mtp", "named"), ("self", "its config"), ("eagle3", "its config")],
)
def test_beyond_the_drafts_positions_a_request_goes_on_without(
    draft: str, source: str, pairs: dict[str, Pair], tmp_path: Path
) -> None:
    pair, end = pairs[draft], 40
    more: dict[str, Any] = {"max_model_len": end}
    if source == "its config":
        folder = Path(pair.speculative["model"])
        config = config_of(folder) | {"max_position_embeddings": end}
        more = {"model": str(write_folder(tmp_path / "short", config, tensors_of(folder)))}
    engine = speculating(pair, 5, more, max_num_batched_tokens=33)
    asked = {}
    for length in (4, 30, 35, 38, 39, 40, 41, 60):
        prompt = prompt_of(length, seed=1)
        asked[engine.add(prompt, max_tokens=30)] = (prompt, 30)
    engine.run()
    check_answers(engine, pair.target, asked)
    rows = drafting_rows(engine)
    assert {row.request.num_prompt for row in rows} == {4, 30, 35, 38}
    assert max(row.end for row in rows) == end
    if draft == "self":
        assert engine.counts().accepted == engine.counts().drafted
    # Blocks that hold no entries of the draft beyond its positions are found again, and change nothing.
    again = {engine.add(prompt, max_tokens=30): (prompt, 30) for prompt, _ in asked.values()}
    engine.run()
    check_answers(engine, pair.target, again)
    assert sum(engine.outputs[i][0].cached_tokens for i in again) > 0


@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_do_not_outlive_a_preemption(draft: str, pairs: dict[str, Pair]) -> None:
    """Case b20: blocks for about three of eight requests."""
    pair = pairs[draft]
    engine = speculating(pair, 4, num_kv_blocks=12, max_num_batched_tokens=20)
    asked = {}
    for i in range(8):
        prompt = prompt_of(3 + 5 * (i % 4), seed=i % 6)
        asked[engine.add(prompt, max_tokens=40)] = (prompt, 40)
    engine.run()
    assert engine.scheduler.preemptions > 0
    check_answers(engine, pair.target, asked)
    if draft == "self":
        assert engine.counts().accepted == engine.counts().drafted


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("block_size", [16, pytest.param(32, marks=pytest.mark.slow)])
def test_prompts_around_a_block_that_were_seen_before(draft: str, block_size: int, pairs: dict[str, Pair]) -> None:
    """Case b21: fully cached prompts, then the same under preemption."""
    pair, b = pairs[draft], block_size
    engine = speculating(pair, 3, block_size=block_size, num_kv_blocks=11)
    asked = {}
    for length in (b - 1, b, b + 1, 2 * b):
        for _ in range(2):
            prompt = prompt_of(length)
            asked[engine.add(prompt, max_tokens=8)] = (prompt, 8)
            engine.run()
    assert engine.scheduler.kv.hits > 0
    for length in (2 * b - 1, 2 * b, 2 * b + 1, 3 * b, 2 * b, 2 * b + 1):
        prompt = prompt_of(length)
        asked[engine.add(prompt, max_tokens=2 * b)] = (prompt, 2 * b)
    engine.run()
    assert engine.scheduler.preemptions > 0
    check_answers(engine, pair.target, asked)
    if draft == "self":
        assert engine.counts().accepted == engine.counts().drafted


@pytest.mark.parametrize("draft", DRAFTS)
def test_last_chunks_decodes_and_drafts_in_one_step(draft: str, pairs: dict[str, Pair]) -> None:
    """Case b23: chunks of 16, prompts of n * 16 + 1, arriving one by one."""
    pair = pairs[draft]
    engine = speculating(pair, 3, max_num_batched_tokens=16)
    asked = {}
    for i in range(8):
        prompt = prompt_of(16 * (i % 4 + 1) + 1, seed=i)
        asked[engine.add(prompt, max_tokens=14, most_drafted=0 if i == 2 else None)] = (prompt, 14)
        for _ in range(2):
            engine.step()
    engine.run()
    check_answers(engine, pair.target, asked)
    kinds = [{(row.completes, bool(row.drafts), row.count > 1) for row in plan.rows} for plan in engine.steps]
    assert any({(False, False, True), (True, True, True)} <= kind for kind in kinds)
    for row in (row for plan in engine.steps for row in plan.rows):
        assert not (row.drafts and not row.completes)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_step_never_holds_more_tokens_than_it_may(draft: str, pairs: dict[str, Pair]) -> None:
    """Case b24: long prompts arrive while sixteen requests draft."""
    pair, budget = pairs[draft], 64
    engine = speculating(pair, 5, max_num_batched_tokens=budget, num_kv_blocks=200, max_num_seqs=20)
    asked = {}
    for i in range(16):
        prompt = prompt_of(3 + i, seed=i)
        asked[engine.add(prompt, max_tokens=70)] = (prompt, 70)
    for _ in range(8):
        engine.step()
    first, long = len(engine.steps), set()
    for i in range(4):
        prompt = prompt_of(90 + i, seed=i)
        long.add(engine.add(prompt, max_tokens=6))
        asked[max(long)] = (prompt, 6)
        engine.step()
    engine.run()
    check_answers(engine, pair.target, asked)
    assert max(plan.num_tokens for plan in engine.steps) <= budget
    # Drafts leave the long prompts their part of the step.
    read = [
        sum(row.count for row in plan.rows if row.request.request_id in long and not row.drafts and row.count > 1)
        for plan in engine.steps[first:]
    ]
    while not read[-1]:
        read.pop()
    assert min(read[:-1]) >= (budget - 16) // 2 - 1


@pytest.mark.parametrize("draft", ["ngram", "self", "eagle3"])
def test_k_follows_the_number_of_running_requests(draft: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[draft]
    rules = [[1, 2, 4], [3, 4, 1], [5, 64, 0]]
    engine = speculating(pair, 5, {"num_speculative_tokens_per_batch_size": rules})
    asked = {}
    for i in range(7):
        prompt = prompt_of(20 + i, seed=i)
        asked[engine.add(prompt, max_tokens=10 + 6 * i)] = (prompt, 10 + 6 * i)
    running, seen, before = 0, set(), engine.counts()
    while engine.step():
        drafts = {len(row.drafts) for row in engine.steps[-1].rows}
        most = next((k for lo, hi, k in rules if lo <= running <= hi), 0)
        assert max(drafts) <= most
        if draft != "ngram" and most and engine.scheduler.running == running:
            assert max(drafts) == most or all(
                row.request.max_len - row.start - 2 < most for row in engine.steps[-1].rows
            )
        if running > 4:  # k = 0 adds nothing
            counts = engine.counts()
            assert (counts.drafted, counts.accepted, counts.lengths) == (
                before.drafted,
                before.accepted,
                before.lengths,
            )
        running = engine.scheduler.running
        seen.add(running)
    check_answers(engine, pair.target, asked)
    assert seen >= {7, 4, 2, 1}
    assert sum(engine.counts().drafted) > 0
    assert engine.counts().drafted[4] == 0


@pytest.mark.parametrize("draft", ["self", "noisy", "independent", "ngram"])
def test_adaptive_k_follows_each_requests_drafts(
    draft: str, pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole drafts lengthen the next one, those of which less than half is right shorten it, between 1 and k."""
    pair, k, new = pairs[draft], 6, 60
    # The other rule, by load, goes by the clock and tries shorter ones now and then.
    monkeypatch.setattr(BestLength, "choose", lambda self, running: k)
    engine = speculating(pair, k, {"adaptive_k": True})
    asked = {}
    for i in range(4):
        prompt = prompt_of(20 + i, seed=i)
        asked[engine.add(prompt, max_tokens=new)] = (prompt, new)
    engine.run()
    check_answers(engine, pair.target, asked)
    lengths = []
    for i in asked:
        length, done = k, 0
        for output in engine.outputs[i]:
            if output.drafted:
                # An ngram may find less to copy than it may draft.
                assert output.drafted == min(length, new - done - 1) or draft == "ngram" and output.drafted <= length
                change = (output.accepted == output.drafted) - (2 * output.accepted < output.drafted)
                length = max(1, min(k, length + change))
                lengths.append(length)
            done += len(output.token_ids)
    if draft == "self":
        assert set(lengths) == {k}
    if draft in ("noisy", "independent"):
        assert min(lengths) < k
    if draft == "independent":
        assert lengths.count(1) > len(lengths) / 2


def test_requests_that_ask_for_fewer_drafts_teach_nothing_of_the_load(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[int] = []
    monkeypatch.setattr(BestLength, "choose", lambda self, running: 3)
    monkeypatch.setattr(BestLength, "learn", lambda self, running, length, tokens, seconds: learned.append(length))
    engine = speculating(pairs["self"], 3, {"adaptive_k": True})
    engine.add(prompt_of(20), max_tokens=20, most_drafted=0)
    engine.run()
    assert learned == []
    engine.add(prompt_of(20), max_tokens=20)
    engine.run()
    assert set(learned) == {3}


def test_synthetic_rates_are_reached_and_counted_by_position(pairs: dict[str, Pair]) -> None:
    rates = (0.8, 0.5, 0.25)
    more = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    engine = speculating(pairs["independent"], 3, more, num_kv_blocks=200, max_num_seqs=64)
    new = 121
    ids = [engine.add(prompt_of(5, seed=i), max_tokens=new) for i in range(20)]
    engine.run()
    assert all(len(engine.tokens(i)) == new for i in ids)
    counts = engine.counts()
    assert counts.drafted[0] > 800
    tried = [counts.drafted[0], *counts.accepted[:2]]
    for i, rate in enumerate(rates):
        # The last draft of a request may be shorter than k, hence the slack.
        spread = (rate * (1 - rate) / tried[i]) ** 0.5
        assert counts.accepted[i] / tried[i] == pytest.approx(rate, abs=4 * spread + 20 / tried[i])
    assert sum(i * number for i, number in enumerate(counts.lengths)) == sum(counts.accepted)


@pytest.mark.parametrize(("length", "k"), [(1.0, 4), (2.6, 4), (5.0, 4), (1.5, 1)])
def test_a_synthetic_length_is_reached(length: float, k: int, pairs: dict[str, Pair]) -> None:
    more = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": length}
    engine = speculating(pairs["independent"], k, more, num_kv_blocks=200, max_num_seqs=64)
    engine.generate([prompt_of(5, seed=i) for i in range(16)], max_tokens=101)
    counts = engine.counts()
    # Only drafts of k tokens: those at the end are shorter.
    whole = [(o.drafted, o.accepted) for outputs in engine.outputs.values() for o in outputs if o.drafted == k]
    mean = sum(accepted for _, accepted in whole) / len(whole)
    assert 1 + mean == pytest.approx(length, abs=0.15)
    assert sum(counts.lengths) >= len(whole)


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_request_may_do_without_drafts(draft: str, pairs: dict[str, Pair]) -> None:
    """And what it leaves in the cache is worth as much to those that draft."""
    pair = pairs[draft]
    engine = speculating(pair, 4)
    prompts = [prompt_of(50, seed=1), prompt_of(33, seed=2)]
    without = {engine.add(prompt, max_tokens=20, most_drafted=0): (prompt, 20) for prompt in prompts}
    engine.run()
    assert sum(engine.counts().drafted) == 0
    mixed = {
        engine.add(prompt, max_tokens=30, most_drafted=(0, None, 1, 2)[i % 4]): (prompt, 30)
        for i, prompt in enumerate(prompts * 2)
    }
    engine.run()
    check_answers(engine, pair.target, without | mixed)
    first = next(iter(mixed))
    assert all(output.drafted == 0 for output in engine.outputs[first])
    assert sum(output.drafted for i in mixed for output in engine.outputs[i]) == sum(engine.counts().drafted) > 0
    if draft == "self":
        assert engine.counts().accepted == engine.counts().drafted
