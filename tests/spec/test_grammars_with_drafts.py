"""Answers bound to a grammar are valid and the same with and without drafts, in any company (cases b20, b26)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.api.json_schema import schema_text
from server.checkpoint.token_bytes import TokenBytes
from server.checkpoint.tokenizer import load_tokenizer
from server.messages import Grammar, RequestOutput
from tests.spec.drafts import Pair
from tests.spec.engine_harness import Harness, make_engine

EOS = 258
PROMPTS = [[5, 9, 200, 31, 7, 7, 64, 5, 9], [17] * 30, list(range(60, 97)), [65, 66] * 20]
COLOURS = ["red", "green", "blue"]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": COLOURS}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LONGEST = 700
"""Tokens: a byte each, 12 characters of 12 bytes at most, and 32 blanks between any two parts."""
DRAFTS = ["self", "ngram", "noisy", "eagle3"]


def grammar_of(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", schema_text(schema))


def speculating(pair: Pair, k: int, **options: Any) -> Harness:
    return make_engine(
        pair.target, pair.speculative | {"num_speculative_tokens": k}, **{"num_kv_blocks": 800} | options
    )


def plain(pair: Pair, **options: Any) -> Harness:
    return make_engine(pair.target, None, **{"num_kv_blocks": 800} | options)


def ask(engine: Harness, prompt: Sequence[int], grammar: Grammar | None, **params: Any) -> int:
    return engine.add(prompt, **{"grammar": grammar, "max_tokens": LONGEST, "stop_token_ids": (EOS,)} | params)


def text(engine: Harness, request_id: int) -> str:
    token_bytes = TokenBytes(load_tokenizer(engine.plan.target.checkpoint))
    return b"".join(token_bytes[i] for i in engine.tokens(request_id) if i != EOS).decode()


def last(engine: Harness, request_id: int) -> RequestOutput:
    return engine.outputs[request_id][-1]


def assert_valid(answer: str) -> None:
    value = json.loads(answer)
    assert list(value) == ["name", "age", "tags"]
    assert isinstance(value["name"], str) and len(value["name"]) <= 12
    assert type(value["age"]) is int and 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= set(COLOURS)


@pytest.mark.parametrize("number", [20, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("draft", ["self", "ngram"])
def test_sampled_answers_are_valid(draft: str, number: int, pairs: dict[str, Pair]) -> None:
    """Case b26: k = 8, temperature 1; every answer is over within what the schema can take."""
    engine = speculating(pairs[draft], 8)
    grammar = grammar_of(SCHEMA)
    ids = [ask(engine, PROMPTS[i % 4], grammar, temperature=1.0, seed=i) for i in range(number)]
    engine.run()
    for i in ids:
        assert last(engine, i).finish_reason == "stop"
        assert_valid(text(engine, i))
    assert len({text(engine, i) for i in ids}) > number // 2
    counts = engine.counts()
    assert sum(counts.accepted) > number // 4
    assert all(accepted <= drafted for accepted, drafted in zip(counts.accepted, counts.drafted, strict=True))


@pytest.mark.parametrize("draft", DRAFTS)
def test_answers_equal_plain_decoding(draft: str, pairs: dict[str, Pair]) -> None:
    """Greedy and seeded, with chunked prompts, company without a grammar, and every way to end."""
    pair, grammar = pairs[draft], grammar_of(SCHEMA)
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "seed": 3},
        {"max_tokens": 17},
        {"min_tokens": 300, "frequency_penalty": 0.5, "logprobs": 2},
        {"logit_bias": {65: 5.0, 66: -100.0}, "stop_token_ids": (EOS, 70)},
        {"grammar": Grammar("regex", "(ab|a|c)+"), "max_tokens": 60, "min_tokens": 20},
        {"grammar": Grammar("regex", "[a-f]{3,40}x?"), "stop_token_ids": ()},
        {"grammar": Grammar("lark", 'start: "yes" | "no" | "perhaps"'), "min_tokens": 12},
        {"grammar": None},
    ]
    answers = []
    for engine in (plain(pair), speculating(pair, 4, max_num_batched_tokens=24)):
        ids = [ask(engine, PROMPTS[i % 4], **{"grammar": grammar} | one) for i, one in enumerate(asked * 2)]
        engine.run()
        ends = [(last(engine, i).finish_reason, last(engine, i).stop_token_id, last(engine, i).error) for i in ids]
        answers.append([(engine.tokens(i), end) for i, end in zip(ids, ends, strict=True)])
    assert answers[0] == answers[1]
    assert {end[0] for _, end in answers[0]} == {"stop", "length"}


def test_what_a_perfect_draft_may_not_say_counts_nowhere(pairs: dict[str, Pair]) -> None:
    """The draft knows no grammar: up to where it is cut it says what the target says, and that alone is counted."""
    engine = speculating(pairs["self"], 8)
    ids = [ask(engine, prompt, grammar_of(SCHEMA), max_tokens=100) for prompt in PROMPTS]
    engine.run()
    counts = engine.counts()
    assert counts.accepted == counts.drafted
    assert sum(counts.drafted) == sum(output.drafted for i in ids for output in engine.outputs[i]) > 0


def test_drawn_drafts_stay_within_the_grammar(pairs: dict[str, Pair]) -> None:
    pair = Pair(pairs["noisy"].target, pairs["noisy"].speculative | {"draft_sample_method": "probabilistic"})
    engine = speculating(pair, 4)
    ids = [ask(engine, PROMPTS[i % 4], grammar_of(SCHEMA), temperature=1.0, seed=i) for i in range(12)]
    engine.run()
    for i in ids:
        assert_valid(text(engine, i))


@pytest.mark.parametrize("draft", ["self", "ngram"])
def test_a_grammar_survives_preemption(draft: str, pairs: dict[str, Pair]) -> None:
    """Case b20."""
    grammar = grammar_of(SCHEMA)
    alone = speculating(pairs[draft], 4)
    expected = [alone.tokens(i) for i in _one_by_one(alone, grammar)]
    crowded = speculating(pairs[draft], 4, num_kv_blocks=20, block_size=16)
    ids = [ask(crowded, PROMPTS[i % 4], grammar, temperature=0.7, seed=i, max_tokens=160) for i in range(6)]
    crowded.run()
    assert crowded.scheduler.preemptions > 0
    assert [crowded.tokens(i) for i in ids] == expected


def _one_by_one(engine: Harness, grammar: Grammar) -> list[int]:
    ids = []
    for i in range(6):
        ids.append(ask(engine, PROMPTS[i % 4], grammar, temperature=0.7, seed=i, max_tokens=160))
        engine.run()
    return ids


@pytest.mark.parametrize("draft", ["self", "plain"])
def test_a_contradiction_ends_its_own_request_only(draft: str, pairs: dict[str, Pair]) -> None:
    """After "yes" the bias bans all that may follow; the answer until then is delivered."""
    engine = speculating(pairs["self"], 4) if draft == "self" else plain(pairs["self"])
    files = load_tokenizer(engine.plan.target.checkpoint)
    banned = files.tokenizer.token_to_id("!")
    grammar = Grammar("lark", 'start: "yes!"')
    good = ask(engine, PROMPTS[0], grammar)
    bad = ask(engine, PROMPTS[0], grammar, logit_bias={banned: -100.0})
    engine.run()
    assert (text(engine, good), last(engine, good).finish_reason) == ("yes!", "stop")
    assert (text(engine, bad), last(engine, bad).finish_reason) == ("yes", "error")
    error = last(engine, bad).error
    assert error is not None and "No token is left" in error


def test_an_end_of_text_comes_only_where_the_grammar_is_complete(pairs: dict[str, Pair]) -> None:
    engine = speculating(pairs["self"], 4)
    bias = {EOS: 100.0}
    whole = ask(engine, PROMPTS[0], Grammar("regex", "(abc)+"), logit_bias=bias)
    held = ask(engine, PROMPTS[0], Grammar("regex", "(abc)+"), logit_bias=bias, min_tokens=8)
    endless = ask(engine, PROMPTS[0], Grammar("regex", "(abc)+"), stop_token_ids=(), max_tokens=40)
    engine.run()
    assert (text(engine, whole), last(engine, whole).stop_token_id) == ("abc", EOS)
    assert (text(engine, held), last(engine, held).stop_token_id) == ("abcabcabc", EOS)
    assert (len(engine.tokens(endless)), last(engine, endless).finish_reason) == (40, "length")


LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-50, 50),
        st.integers(0, 99),
    ),
    st.builds(lambda least: {"type": "string", "minLength": least, "maxLength": least + 3}, st.integers(0, 3)),
    st.builds(
        lambda values: {"enum": values}, st.lists(st.sampled_from(["a", "b\n", 1, None, 2.5]), min_size=1, unique=True)
    ),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.dictionaries(st.sampled_from(["x", "y z", "é"]), inner, max_size=2).map(
            lambda properties: {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            }
        ),
    ),
    max_leaves=4,
)


def conforms(value: object, schema: dict[str, Any]) -> bool:
    """The oracle: a validator for the schemas above."""
    match schema:
        case {"enum": values}:
            return any(value == one and type(value) is type(one) for one in values)
        case {"type": "boolean"}:
            return isinstance(value, bool)
        case {"type": "null"}:
            return value is None
        case {"type": "integer", "minimum": low, "maximum": high}:
            return type(value) is int and low <= value <= high
        case {"type": "string", "minLength": least, "maxLength": most}:
            return isinstance(value, str) and least <= len(value) <= most
        case {"type": "array", "items": items, "maxItems": most}:
            return isinstance(value, list) and len(value) <= most and all(conforms(one, items) for one in value)
        case {"properties": properties}:
            return (
                isinstance(value, dict)
                and value.keys() == properties.keys()
                and all(conforms(value[name], inner) for name, inner in properties.items())
            )
    raise AssertionError(schema)


@pytest.fixture(scope="module")
def engine(pairs: dict[str, Pair]) -> Harness:
    return speculating(pairs["self"], 4)


@settings(max_examples=15, deadline=None)
@given(schema=SCHEMAS, temperature=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 2**40))
def test_any_schema_holds(schema: dict[str, Any], temperature: float, seed: int, engine: Harness) -> None:
    i = ask(engine, PROMPTS[seed % 4], grammar_of(schema), temperature=temperature, seed=seed)
    engine.run()
    assert last(engine, i).finish_reason == "stop"
    assert conforms(json.loads(text(engine, i)), schema)
