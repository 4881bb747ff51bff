"""Pre-tokenisers of byte-level BPE vocabularies in GGUF files, by the name in `tokenizer.ggml.pre`.

GGUF stores only the name; the patterns are those that the models' own tokenizers use (public facts, as in llama.cpp's
table).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_SIGNS_AND_SPACE}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenization:
    """How text is cut before merging."""

    patterns: tuple[str, ...]
    """Applied one after the other, each cutting the pieces of the one before."""
    ignore_merges: bool = False
    """A piece that is a token is taken whole, whatever the merges say."""
    add_bos: bool = False
    """Whether BOS is put in front when `tokenizer.ggml.add_bos_token` does not say."""
    nfc: bool = False
    """Whether text is first brought to Unicode normal form C."""


_SINGLE_DIGITS = PreTokenization((r"\p{N}", _GPT2))
_LIKE_GPT2 = PreTokenization((_GPT2,))
_LIKE_LLAMA3 = PreTokenization((_LLAMA3,), ignore_merges=True, add_bos=True)
_LIKE_QWEN2 = PreTokenization((_QWEN2,), nfc=True)

PRE_TOKENIZATIONS: Mapping[str, PreTokenization] = {
    "default": PreTokenization((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _SINGLE_DIGITS
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "jais"), _LIKE_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _LIKE_LLAMA3),
    "smaug-bpe": PreTokenization((_LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _LIKE_QWEN2),
    **dict.fromkeys(("glm4", "chatglm-bpe"), PreTokenization((_LLAMA3,))),
    "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, add_bos=True),
}


def make_pre_tokenizer(patterns: tuple[str, ...]) -> PreTokenizer:
    """Build the pre-tokeniser: the cuts, then bytes written as printable characters."""
    cuts: list[PreTokenizer] = [Split(Regex(pattern), "isolated") for pattern in patterns]
    steps: PreTokenizer = Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    return steps
