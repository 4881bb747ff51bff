"""Masks of a request's grammar against brute force over finite languages, whatever is drafted and taken back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from server.checkpoint.tokenizer import TokenizerFiles
from server.engine.grammar_compile import compile_grammar
from server.engine.grammar_vocabulary import GrammarVocabulary, grammar_vocabulary
from server.engine.sampling.grammar import GrammarError, GrammarState, Mask
from server.engine.sampling.request import RequestSampling, SampleRow
from server.engine.sampling.sampler import Sampler
from server.messages import Grammar, SamplingParams

PIECES = ("a", "b", "c", "ab", "ba", "abc", "bcb", "d")
END, OTHER_MARK = len(PIECES), len(PIECES) + 1
VOCAB_SIZE = len(PIECES) + 2
IDS = range(VOCAB_SIZE)


@cache
def vocabulary() -> GrammarVocabulary:
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|mark|>"])
    files = TokenizerFiles(tokenizer, {}, {}, (END,), frozenset({END, OTHER_MARK}), "pieces")
    return grammar_vocabulary(files, VOCAB_SIZE)


def choice(words: list[str]) -> Grammar:
    return Grammar("lark", "start: " + " | ".join(map(json.dumps, words)))


def state(grammar: Grammar, stops: tuple[int, ...] = (END,)) -> GrammarState:
    return compile_grammar(grammar, vocabulary()).start(stops)


def ids_of(mask: Mask) -> set[int]:
    return {i for i in IDS if mask[i >> 5] >> np.uint32(i & 31) & 1}


@dataclass(frozen=True)
class Language:
    """The oracle: a finite set of words."""

    words: frozenset[str]

    def text(self, tokens: list[int]) -> str:
        return "".join(PIECES[token] for token in tokens)

    def goes_on(self, text: str) -> bool:
        return any(word.startswith(text) for word in self.words)

    def allowed(self, tokens: list[int]) -> set[int]:
        text = self.text(tokens)
        found = {i for i, piece in enumerate(PIECES) if self.goes_on(text + piece)}
        return found | ({END} if text in self.words else set())

    def forced(self, tokens: list[int]) -> bool:
        """Whether the next character is certain: then the mask may hold to one way of writing what must come."""
        text = self.text(tokens)
        following = {word[len(text)] if len(word) > len(text) else "" for word in self.words if word.startswith(text)}
        return len(following) == 1

    def ended(self, tokens: list[int]) -> bool:
        return self.allowed(tokens) == {END}

    def admitted(self, tokens: list[int], draft: list[int]) -> int:
        for count, token in enumerate(draft):
            if self.ended(tokens) or token not in self.allowed(tokens):
                return count
            if token == END:
                return count + 1
            tokens = [*tokens, token]
        return len(draft)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), words=st.sets(st.text("abc", min_size=1, max_size=6), min_size=1, max_size=6))
def test_masks_follow_any_output_and_draft(data: st.DataObject, words: set[str]) -> None:
    language, grammar = Language(frozenset(words)), state(choice(sorted(words)))
    if not language.allowed([]):
        assert not ids_of(grammar.mask([]))
        return
    output: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        draft = data.draw(st.lists(st.sampled_from(IDS), max_size=4))
        admitted = language.admitted(output, draft)
        assert grammar.admitted(output, draft) == admitted
        for count in data.draw(st.permutations(range(admitted + 1))):
            after = [*output, *draft[:count]]
            if END in after or language.ended(after):
                assert ids_of(grammar.mask(output, draft[:count])) == set(IDS)
            elif language.forced(after):
                mask = ids_of(grammar.mask(output, draft[:count]))
                assert mask
                assert mask <= language.allowed(after)
            else:
                assert ids_of(grammar.mask(output, draft[:count])) == language.allowed(after)
        # Forward by one token, or back to anywhere, as after a preemption that nobody announced.
        choices = sorted(language.allowed(output) - {END})
        if choices and data.draw(st.integers(0, 4)):
            output.append(data.draw(st.sampled_from(choices)))
        else:
            del output[data.draw(st.integers(0, len(output))) :]
        assert grammar.ended(output) == (bool(output) and language.ended(output))


def test_an_end_mark_ends_and_only_where_the_grammar_is_complete() -> None:
    grammar = state(Grammar("regex", "(ab)+"))
    a, b = 0, 1
    assert ids_of(grammar.mask([a, b])) == {a, PIECES.index("ab"), END}
    assert not grammar.ended([a, b])
    assert grammar.ended([a, b, END])
    assert grammar.admitted([], [a, b, END, a]) == 3
    assert grammar.admitted([], [a, END]) == 1
    assert grammar.end_ids == {END}


def test_without_an_end_mark_among_the_stops_the_answer_goes_on_while_it_can() -> None:
    grammar = state(Grammar("regex", "(ab)+"), stops=())
    assert ids_of(grammar.mask([0, 1])) == {0, PIECES.index("ab")}
    assert state(Grammar("regex", "ab"), stops=()).ended([0, 1])


def test_a_stop_id_that_is_text_ends_nothing_by_itself() -> None:
    assert state(Grammar("regex", "(ab)+"), stops=(1, END)).end_ids == {END}


def test_a_grammar_may_name_a_special_token() -> None:
    grammar = state(Grammar("lark", 'start: "a" <|mark|> "b"'))
    assert ids_of(grammar.mask([0])) == {OTHER_MARK}
    assert ids_of(grammar.mask([0, OTHER_MARK])) == {1}


@pytest.mark.parametrize("grammar", [Grammar("lark", "start: ("), Grammar("regex", "(("), Grammar("lark", "start: b")])
def test_what_cannot_be_compiled_is_told(grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match="cannot be compiled"):
        state(grammar)


def test_a_request_that_is_stuck_says_so_and_can_go_back() -> None:
    grammar = state(Grammar("lark", 'start: ("a"{1,1000}){1,1000} "b"'))
    output = [0] * 2000
    with pytest.raises(GrammarError, match="too complex"):
        for length in range(0, 2000, 20):
            grammar.mask(output[:length])
    assert ids_of(grammar.mask([0])) >= {0, 1}


def request(grammar: Grammar, **params: Any) -> RequestSampling:
    sampling = SamplingParams(**{"max_tokens": 9, "seed": 1, "temperature": 0.0, "stop_token_ids": (END,)} | params)
    return RequestSampling(sampling, [0], VOCAB_SIZE, state(grammar, sampling.stop_token_ids))


A, B, C, AB = 0, 1, 2, 3


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        ({}, [], {A, AB, B}),
        ({"allowed_token_ids": (A, C, END)}, [], {A}),
        ({"logit_bias": {A: -100.0}}, [], {AB, B}),
        ({"bad_words": ((AB,),)}, [], {A, B}),
        ({"bad_words": ((A, B),)}, [A], {END}),
        ({"min_tokens": 3}, [A], {B}),
        ({"min_tokens": 3, "allowed_token_ids": (A, END)}, [A], {END}),  # the grammar's end wins
    ],
)
def test_grammar_and_bans_together(params: dict[str, Any], output: list[int], expected: set[int]) -> None:
    mask = request(choice(["ab", "a", "b"]), **params).mask(output)
    assert mask is not None
    assert ids_of(mask) == expected


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (C, END)},
        {"logit_bias": {A: -100.0, AB: -100.0, B: -100.0}},
        {"bad_words": ((A,), (AB,), (B,))},
    ],
)
def test_a_contradiction_is_an_error(params: dict[str, Any]) -> None:
    with pytest.raises(GrammarError, match="No token is left"):
        request(choice(["ab", "a", "b"]), **params).mask([])


def test_the_sampler_draws_from_what_is_left_and_leaves_other_rows_alone() -> None:
    logits = torch.randn(40, VOCAB_SIZE + 3, generator=torch.Generator().manual_seed(1))
    bound = request(choice(["ab", "ba"]), temperature=1.0)
    free = RequestSampling(SamplingParams(max_tokens=9, seed=1, temperature=1.0), [0], VOCAB_SIZE)
    output = [A]
    rows = [SampleRow(bound, output, (), bound.mask(output)) if i % 2 else SampleRow(free, [0] * i) for i in range(40)]
    got = Sampler()(logits, rows).token_ids.tolist()
    alone = Sampler()(logits[::2], rows[::2]).token_ids.tolist()
    assert set(got[1::2]) == {B}
    assert got[::2] == alone
