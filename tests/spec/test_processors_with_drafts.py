"""Every logits processor, stop rule and score holds at every position of an accepted run (cases b4, b7, b9-b11, b14).

What plain decoding answers is the oracle; a perfect, a middling and a copying draft make runs of every length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server.messages import RequestOutput, TokenLogprobs
from tests.spec.drafts import Pair
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.test_run_ahead import overlapping

NEW = 24
PROMPTS = ([5, 9, 200, 31, 7, 7, 64, 5, 9, 200, 31], [17] * 9, list(range(60, 97)))
DRAFTS = ("self", "noisy", "ngram")
Answer = tuple[list[int], str | None, int | None]

# By name: what is asked for. "{t}" stands for the token that plain greedy decoding gives at place t.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "presence -2": {"presence_penalty": -2.0},
    "presence 2": {"presence_penalty": 2.0},
    "frequency -2": {"frequency_penalty": -2.0},
    "frequency 0.5": {"frequency_penalty": 0.5},
    "frequency 2": {"frequency_penalty": 2.0},
    "repetition 1.3": {"repetition_penalty": 1.3},
    "repetition 0.7": {"repetition_penalty": 0.7},
    "all penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bias -100": {"logit_bias": {"{1}": -100.0, "{4}": -100.0}},
    "bias 100": {"logit_bias": {77: 100.0}, "frequency_penalty": 2.0},
    "bias 3": {"logit_bias": dict.fromkeys(range(0, 250, 3), 3.0)},
    "allowed": {"allowed_token_ids": tuple(range(40, 52))},
    "allowed with penalty": {"allowed_token_ids": tuple(range(40, 52)), "frequency_penalty": 1.0},
    "bad words": {"bad_words": (("{2}",), ("{4}", "{5}"), ("{7}", "{8}", "{9}"))},
    "stop": {"stop_token_ids": ("{6}",)},
    "min tokens": {"stop_token_ids": ("{3}", "{6}", 258), "min_tokens": 20},
    "min tokens beyond": {"stop_token_ids": ("{3}",), "min_tokens": NEW},
    "sampled": {"temperature": 0.8},
    "hot": {"temperature": 1.5, "min_p": 0.1},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "top_k": {"temperature": 1.2, "top_k": 5},
    "top_p": {"temperature": 1.2, "top_p": 0.7},
    "sampled with all": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "logit_bias": {8: 2.0},
        "stop_token_ids": (3, 100, 200),
        "min_tokens": 10,
    },
}


@functools.cache
def greedy(target: Path, prompt: tuple[int, ...], count: int = NEW) -> list[int]:
    return make_engine(target).generate([prompt], max_tokens=count)[0]


def filled(value: Any, tokens: Sequence[int]) -> Any:
    """The same with tokens for "{t}"."""
    if isinstance(value, str):
        return tokens[int(value.strip("{}"))]
    if isinstance(value, dict):
        return {filled(key, tokens) if str(key).startswith("{") else key: v for key, v in value.items()}
    return tuple(filled(one, tokens) for one in value) if isinstance(value, tuple) else value


def ask_everything(engine: Harness, target: Path, **more: Any) -> dict[tuple[str, int], int]:
    """One request for each name and prompt, all at once."""
    ids = {}
    for name, asked in ASKED.items():
        for which, prompt in enumerate(PROMPTS):
            tokens = greedy(target, tuple(prompt))
            params = {key: filled(value, tokens) for key, value in asked.items()}
            ids[name, which] = engine.add(prompt, **{"max_tokens": NEW, "seed": 1000 + which, **params, **more})
    engine.run()
    return ids


def answer(engine: Harness, request_id: int) -> Answer:
    last = engine.outputs[request_id][-1]
    return engine.tokens(request_id), last.finish_reason, last.stop_token_id


@functools.cache
def plain(target: Path) -> dict[tuple[str, int], tuple[Answer, list[TokenLogprobs], list[TokenLogprobs | None]]]:
    engine = make_engine(target, num_kv_blocks=400)
    ids = ask_everything(engine, target, logprobs=3, prompt_logprobs=2)
    return {
        key: (answer(engine, i), logprobs(engine.outputs[i]), prompt_logprobs(engine.outputs[i]))
        for key, i in ids.items()
    }


def logprobs(outputs: list[RequestOutput]) -> list[TokenLogprobs]:
    return [one for output in outputs for one in output.logprobs or []]


def prompt_logprobs(outputs: list[RequestOutput]) -> list[TokenLogprobs | None]:
    (found,) = (output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None)
    return found


def speculating(pair: Pair, k: int, **settings: Any) -> Harness:
    return make_engine(pair.target, pair.speculative | {"num_speculative_tokens": k}, **settings)


@pytest.mark.parametrize("k", [1, pytest.param(4, marks=pytest.mark.slow), 8])
@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_equal_plain_decoding(draft: str, k: int, pairs: dict[str, Pair]) -> None:
    target = pairs[draft].target
    engine = speculating(pairs[draft], k, num_kv_blocks=400)
    ids = ask_everything(engine, target)
    wrong = {key for key, i in ids.items() if answer(engine, i) != plain(target)[key][0]}
    assert not wrong
    assert sum(engine.counts().accepted) > 20


@pytest.mark.parametrize("draft", ["self", "noisy"])
def test_scores_equal_plain_decoding(draft: str, pairs: dict[str, Pair]) -> None:
    target = pairs[draft].target
    engine = speculating(pairs[draft], 4, num_kv_blocks=400, max_num_batched_tokens=100)
    for key, i in ask_everything(engine, target, logprobs=3, prompt_logprobs=2).items():
        told, scores, prompt_scores = plain(target)[key]
        assert answer(engine, i) == told
        assert_same_scores(logprobs(engine.outputs[i]), scores)
        assert prompt_logprobs(engine.outputs[i])[0] is None
        assert_same_scores(prompt_logprobs(engine.outputs[i])[1:], prompt_scores[1:])


@pytest.mark.parametrize("draft", ["noisy", "independent"])
def test_scores_of_drawn_drafts_are_those_of_their_tokens(draft: str, pairs: dict[str, Pair]) -> None:
    """With probabilistic drafts the answer is another one; its scores must be what scoring the answer gives."""
    pair = Pair(pairs[draft].target, pairs[draft].speculative | {"draft_sample_method": "probabilistic"})
    engine = speculating(pair, 3)
    i = engine.add(PROMPTS[0], max_tokens=NEW, temperature=1.0, logprobs=3)
    engine.run()
    scorer = make_engine(pair.target)
    j = scorer.add([*PROMPTS[0], *engine.tokens(i)], max_tokens=0, prompt_logprobs=3)
    scorer.run()
    assert_same_scores(logprobs(engine.outputs[i]), prompt_logprobs(scorer.outputs[j])[len(PROMPTS[0]) :])


def assert_same_scores(found: Sequence[TokenLogprobs | None], wanted: Sequence[TokenLogprobs | None]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        assert (one.rank, one.top_ids) == (other.rank, other.top_ids)
        assert [one.logprob, *one.top_logprobs] == pytest.approx([other.logprob, *other.top_logprobs], abs=1e-4)


@pytest.mark.parametrize("draft", DRAFTS)
def test_penalties_and_min_tokens_do_not_depend_on_k(draft: str, pairs: dict[str, Pair]) -> None:
    """Case b10; the floor counts tokens, not steps."""
    target = pairs[draft].target
    stops = tuple(dict.fromkeys(greedy(target, tuple(PROMPTS[0]))))[:4]
    asked = {"max_tokens": 40, "frequency_penalty": 0.5, "min_tokens": 20, "stop_token_ids": stops}
    without = make_engine(target)
    i = without.add(PROMPTS[0], **asked)
    without.run()
    for k in (1, 4, 8):
        engine = speculating(pairs[draft], k)
        j = engine.add(PROMPTS[0], **asked)
        engine.run()
        assert answer(engine, j) == answer(without, i)
        assert len(engine.tokens(j)) >= 20
        assert not set(engine.tokens(j)[:20]) & set(stops)


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_floor_ends_inside_an_accepted_run(draft: str, pairs: dict[str, Pair]) -> None:
    """A stop id counts from exactly min_tokens on, wherever the run began."""
    target = pairs[draft].target
    tokens = greedy(target, tuple(PROMPTS[2]))
    place = next(p for p in range(9, NEW) if tokens[p] not in tokens[:p])
    engine, without = speculating(pairs[draft], 8, num_kv_blocks=100), make_engine(target, num_kv_blocks=100)
    asked = [{"max_tokens": NEW, "min_tokens": n, "stop_token_ids": (tokens[place],)} for n in range(place + 4)]
    ids = [(engine.add(PROMPTS[2], **one), without.add(PROMPTS[2], **one)) for one in asked]
    engine.run()
    without.run()
    for least, (i, j) in enumerate(ids):
        assert answer(engine, i) == answer(without, j)
        if least <= place:
            assert answer(engine, i) == (tokens[: place + 1], "stop", tokens[place])
        else:
            assert len(engine.tokens(i)) > place + 1


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_banned_token_never_comes_up(draft: str, pairs: dict[str, Pair]) -> None:
    """Case b11."""
    target = pairs[draft].target
    engine = speculating(pairs[draft], 8)
    tokens = dict.fromkeys(greedy(target, tuple(PROMPTS[1]))[:5])
    ids = {token: engine.add(PROMPTS[1], max_tokens=100, logit_bias={token: -100.0}) for token in tokens}
    forced = engine.add(PROMPTS[1], max_tokens=40, logit_bias={7: 100.0})
    engine.run()
    assert all(token not in engine.tokens(i) for token, i in ids.items())
    assert set(engine.tokens(forced)) == {7}


@pytest.mark.parametrize("draft", ["self", "noisy", "ngram"])
def test_a_seeded_answer_is_the_same_alone_and_in_company(draft: str, pairs: dict[str, Pair]) -> None:
    """Case b14: greedy drafts leave the random numbers of plain decoding alone."""
    pair = pairs[draft]
    asked: dict[str, Any] = {"max_tokens": 24, "temperature": 0.9, "seed": 42}
    (expected,) = make_engine(pair.target).generate([PROMPTS[0]], **asked)
    engine = speculating(pair, 4)
    answers = [engine.generate([PROMPTS[0]], **asked)[0] for _ in range(3)]
    for turn in range(3):
        others = [engine.add(PROMPTS[i % 3], max_tokens=30 + i, temperature=1.1, seed=i + 100 * turn) for i in range(4)]
        own = engine.add(PROMPTS[0], **asked)
        others += [engine.add(PROMPTS[i % 3], max_tokens=9 * i, temperature=0.4, seed=-i - turn) for i in (1, 2, 3)]
        engine.run()
        answers.append(engine.tokens(own))
        assert len({tuple(engine.tokens(other)[:9]) for other in others}) > 1
    assert answers == [expected] * 6


@pytest.mark.parametrize("draft", ["noisy", "eagle3"])
def test_a_seeded_answer_of_drawn_drafts_is_the_same_alone_and_in_company(draft: str, pairs: dict[str, Pair]) -> None:
    pair = Pair(pairs[draft].target, pairs[draft].speculative | {"draft_sample_method": "probabilistic"})
    asked: dict[str, Any] = {"max_tokens": 40, "temperature": 0.9, "seed": 42}
    engine = speculating(pair, 4)
    answers = [engine.generate([PROMPTS[0]], **asked)[0] for _ in range(2)]
    others = [engine.add(PROMPTS[i % 3], max_tokens=60, temperature=1.1, seed=i) for i in range(4)]
    own = engine.add(PROMPTS[0], **asked)
    engine.run()
    assert others
    assert [*answers, engine.tokens(own)] == [answers[0]] * 3


@pytest.mark.parametrize("kind", ["stop id", "EOS"])
@pytest.mark.parametrize("draft", ["self", "noisy"])
def test_a_stop_inside_an_accepted_run(kind: str, draft: str, pairs: dict[str, Pair]) -> None:
    """Case b4: the stop counts, whether or not the same run passes max_tokens."""
    pair = pairs[draft]
    tokens = greedy(pair.target, tuple(PROMPTS[2]))
    place = next(p for p in range(4, NEW) if tokens[p] not in tokens[:p])
    stops = (tokens[place],) if kind == "stop id" else (258, tokens[place])
    engine, without = speculating(pair, 8), make_engine(pair.target)
    for limit in range(place, place + 9):
        asked = {"max_tokens": limit, "stop_token_ids": stops, "logprobs": 0}
        i, j = engine.add(PROMPTS[2], **asked), without.add(PROMPTS[2], **asked)
        engine.run()
        without.run()
        assert answer(engine, i) == answer(without, j)
        expected = (tokens[: place + 1], "stop", tokens[place]) if limit > place else (tokens[:limit], "length", None)
        assert answer(engine, i) == expected
        assert len(logprobs(engine.outputs[i])) == len(engine.tokens(i))
    if draft == "self":  # what lies beyond the end counts neither as drafted nor as accepted
        assert engine.counts().accepted == engine.counts().drafted


@pytest.mark.parametrize("draft", ["self", "noisy", "ngram", "eagle3", "mtp"])
def test_as_many_tokens_as_asked_for(draft: str, pairs: dict[str, Pair]) -> None:
    """Cases b7 and d4: delivered = asked for = scored, and a perfect draft's acceptance is 1 whatever the limit."""
    pair = pairs[draft]
    engine = speculating(pair, 5, num_kv_blocks=200)
    expected = greedy(pair.target, tuple(PROMPTS[0]), 40)
    ids = {limit: engine.add(PROMPTS[0], max_tokens=limit, logprobs=0) for limit in range(1, 41)}
    engine.run()
    for limit, i in ids.items():
        assert engine.tokens(i) == expected[:limit]
        assert len(logprobs(engine.outputs[i])) == limit
        assert engine.finish(i) == "length"
        outputs = engine.outputs[i]
        # Tokens of a step: the accepted drafts and one more, but for the last that drafting itself cuts short.
        assert all(len(output.token_ids) == output.accepted + 1 for output in outputs)
        assert sum(output.accepted for output in outputs) == limit - len(outputs)
    counts = engine.counts()
    if draft == "self":
        assert counts.accepted == counts.drafted
    assert sum(counts.accepted) == sum(output.accepted for i in ids.values() for output in engine.outputs[i])
    assert all(a <= d for a, d in zip(counts.accepted, counts.drafted, strict=True))
    assert counts.accepted == sorted(counts.accepted, reverse=True)
    assert counts.drafted == sorted(counts.drafted, reverse=True)


@pytest.mark.parametrize("draft", ["self", "noisy"])
def test_counts_are_right_when_steps_overlap(draft: str, pairs: dict[str, Pair]) -> None:
    """A step launched before the last one's tokens are known may verify drafts beyond the end: they do not count."""
    pair = pairs[draft]
    tokens = greedy(pair.target, tuple(PROMPTS[2]))
    place = next(p for p in range(4, NEW) if tokens[p] not in tokens[:p])
    engine = speculating(pair, 5, num_kv_blocks=200, max_num_seqs=32)
    ids = {limit: engine.add(PROMPTS[2], max_tokens=limit) for limit in range(1, NEW + 1)}
    stopped = engine.add(PROMPTS[2], max_tokens=NEW, stop_token_ids=(tokens[place],))
    ahead = overlapping(engine)
    ahead.run()
    assert ahead.overlapped > 2
    assert {limit: engine.tokens(i) for limit, i in ids.items()} == {limit: tokens[:limit] for limit in ids}
    assert answer(engine, stopped) == (tokens[: place + 1], "stop", tokens[place])
    for left, i in (*ids.items(), (NEW, stopped)):
        for output in engine.outputs[i]:
            assert output.accepted <= output.drafted <= min(5, left)
            left -= len(output.token_ids)
    counts = engine.counts()
    told = [(output.drafted, output.accepted) for i in (*ids.values(), stopped) for output in engine.outputs[i]]
    assert (sum(counts.drafted), sum(counts.accepted)) == tuple(map(sum, zip(*told, strict=True)))
    if draft == "self":
        assert counts.accepted == counts.drafted
