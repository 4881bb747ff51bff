"""The model's tokens as llguidance sees them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

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
    words = _Words(files.tokenizer, tokens, marks)
    tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size + 1, eos_token=vocab_size)
    return GrammarVocabulary(tokenizer, vocab_size, marks)


class _Words:
    """What `TokenizerWrapper` asks for."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: Sequence[bytes], marks: frozenset[int]) -> None:
        self.tokens = [*tokens, _COMPLETE]
        self.eos_token_id = len(tokens)
        self.special_token_ids = [*sorted(marks), self.eos_token_id]
        self._tokenizer = tokenizer
        self._ids = {token: i for i, token in enumerate(tokens) if token and i not in marks}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """The tokens of text that must come next: the mask then allows the first of them only.

        They are the tokenizer's own where these spell just the text (one that puts a space in front does not).
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        data = text.encode()
        usable = all(i < self.eos_token_id and self.tokens[i] in self._ids for i in ids)
        return ids if usable and b"".join(self.tokens[i] for i in ids) == data else self._greedy(data)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token first."""
        found: list[int] = []
        at = 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                return found
            found.append(self._ids[data[at:end]])
            at = end
        return found
