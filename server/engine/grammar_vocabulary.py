"""The model's tokens as llguidance sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper

from server.checkpoint.token_bytes import TokenBytes
from server.checkpoint.tokenizer import TokenizerFiles

_COMPLETE = b"<|complete|>"


@dataclass(frozen=True)
class GrammarVocabulary:
    """What grammars are compiled for."""

    tokenizer: LLTokenizer
    """Of one id more than can be sampled: the last is its end of text."""
    vocab_size: int
    """Ids that can be sampled."""
    marks: frozenset[int]
    """Ids that are no text: special tokens and those that end a sequence."""


def grammar_vocabulary(files: TokenizerFiles, vocab_size: int) -> GrammarVocabulary:
    """Take over the tokens that can be sampled, with the bytes that an answer shows for them.

    Takes about a second for 150,000 tokens.
    """
    token_bytes = TokenBytes(files)
    tokens = [token_bytes[token_id] for token_id in range(vocab_size)]
    marks = frozenset(i for i in files.special_ids | {*files.eos_token_ids} if i < vocab_size)
    words = _Words([*tokens, _COMPLETE], vocab_size, [*sorted(marks), vocab_size])
    tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size + 1, eos_token=vocab_size)
    return GrammarVocabulary(tokenizer, vocab_size, marks)


class _Words:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int, special_token_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = special_token_ids
        self._single = {token: i for i, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        """Tokenise byte by byte: any way will do, since a mask allows every way of writing a text."""
        return [self._single[bytes([byte])] for byte in text if bytes([byte]) in self._single]
