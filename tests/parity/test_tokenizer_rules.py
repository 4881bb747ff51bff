"""How text is cut and joined: against transformers' patterns, and against SentencePiece's rule written out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from server.checkpoint.gguf_pretokenizers import PRE_TOKENIZATIONS, make_pre_tokenizer
from server.checkpoint.gguf_sentencepiece import sentencepiece_tokenizer

TEXT = st.one_of(st.text(max_size=30), st.text(alphabet="aBé1²½ \n\r\t'sLl/.,日😀\u00a0", max_size=40))
SHARED = sorted(PRE_TOKENIZATIONS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys())


def test_there_is_something_to_compare() -> None:
    assert {"llama-bpe", "qwen2", "tekken"} <= set(SHARED)


@pytest.mark.parametrize("name", SHARED)
@settings(max_examples=100, deadline=None)
@given(text=TEXT)
def test_cuts_as_transformers(name: str, text: str) -> None:
    theirs = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    ours = make_pre_tokenizer(PRE_TOKENIZATIONS[name].patterns)
    assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@settings(max_examples=200, deadline=None)
@given(text=TEXT)
def test_gpt2_cuts_as_its_own_implementation(text: str) -> None:
    ours = make_pre_tokenizer(PRE_TOKENIZATIONS["gpt-2"].patterns)
    assert ours.pre_tokenize_str(text) == pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)


def join_like_sentencepiece(text: str, ids: dict[str, int], scores: list[float]) -> list[str]:
    """Again and again join the neighbours whose union scores highest, the leftmost of equals."""
    pieces = list(text)
    while True:
        unions = [
            (scores[ids[a + b]], -i) for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False)) if a + b in ids
        ]
        if not unions:
            return pieces
        index = -max(unions)[1]
        pieces[index : index + 2] = ["".join(pieces[index : index + 2])]


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.text("abc", min_size=2, max_size=5), max_size=25, unique=True), text=st.text("abc", max_size=30)
)
def test_sentencepiece_joins(words: list[str], text: str) -> None:
    tokens = ["a", "b", "c", *words]
    ids = {token: index for index, token in enumerate(tokens)}
    scores = [-float(index) for index in range(len(tokens))]
    found = sentencepiece_tokenizer(ids, scores, None, add_space_prefix=False).encode(text).tokens
    assert found == join_like_sentencepiece(text, ids, scores)
