"""A tokenizer made from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from server.checkpoint.gguf_header import GGUFHeader
from server.checkpoint.gguf_pretokenizers import PRE_TOKENIZATIONS, PreTokenization, make_pre_tokenizer
from server.checkpoint.gguf_sentencepiece import sentencepiece_tokenizer
from server.errors import UserError

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",  # the format's own spelling
}


@dataclass(frozen=True)
class GGUFTokenizer:
    """The parts of a tokenizer that the metadata holds."""

    tokenizer: Tokenizer
    chat_templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    stop_ids: tuple[int, ...]
    """End of sequence, of turn, and of message, as far as they are declared."""
    kind: str


@dataclass(frozen=True)
class _Vocabulary:
    """Typed access to the `tokenizer.ggml.*` keys; an error names the key."""

    header: GGUFHeader

    def get(self, key: str) -> Any:
        return self.header.metadata.get(f"tokenizer.ggml.{key}")

    def fail(self, reason: str) -> UserError:
        return UserError(f"{self.header.path}: the tokenizer in its metadata is unusable: {reason}")

    def array(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        values = self.get(key)
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.fail(f"tokenizer.ggml.{key} is missing or no list of {kind.__name__}")
        if length is not None and len(values) != length:
            raise self.fail(f"tokenizer.ggml.{key} has {len(values)} entries for {length} tokens")
        return values

    def token_id(self, key: str, count: int) -> int | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
            raise self.fail(f"tokenizer.ggml.{key} is {value!r}, but there are {count} tokens")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        return default if value is None else bool(value)


def tokenizer_from_gguf(header: GGUFHeader) -> GGUFTokenizer:
    """Build the tokenizer, special tokens and chat templates that the metadata describes.

    Raises:
        UserError: no tokenizer inside, one of a kind that is not supported, or entries that contradict each other.
    """
    vocabulary = _Vocabulary(header)
    model = vocabulary.get("model")
    tokens: list[str] = vocabulary.array("tokens", str)
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise vocabulary.fail(f"{len(tokens) - len(ids)} of its tokens occur twice")
    types = vocabulary.array("token_type", int, len(tokens)) if vocabulary.get("token_type") is not None else None
    if model == "gpt2":
        name = vocabulary.get("pre") or "default"
        pre = PRE_TOKENIZATIONS.get(name)
        if pre is None:
            raise vocabulary.fail(f"pre-tokeniser {name!r} is not known; known are {', '.join(PRE_TOKENIZATIONS)}")
        tokenizer = _byte_level_bpe(vocabulary, ids, pre)
        kind, add_bos = f"byte-level BPE ({name})", pre.add_bos
    elif model == "llama":
        scores = vocabulary.array("scores", float, len(tokens))
        tokenizer = sentencepiece_tokenizer(
            ids, scores, vocabulary.token_id("unknown_token_id", len(tokens)), vocabulary.flag("add_space_prefix", True)
        )
        kind, add_bos = "SentencePiece BPE", True
    else:
        raise vocabulary.fail(f"tokenizer.ggml.model {model!r} is not supported; gpt2 (byte-level BPE) and llama are")
    _add_marked_tokens(tokenizer, tokens, types)
    _add_ends(vocabulary, tokenizer, tokens, add_bos)
    special_tokens = {}
    for name, key in _NAMED.items():
        token_id = vocabulary.token_id(key, len(tokens))
        if token_id is not None:
            special_tokens[name] = tokens[token_id]
    stops = [vocabulary.token_id(key, len(tokens)) for key in _STOP_KEYS]
    stop_ids = tuple(dict.fromkeys(stop for stop in stops if stop is not None))
    return GGUFTokenizer(tokenizer, _chat_templates(header), special_tokens, stop_ids, kind)


def _byte_level_bpe(vocabulary: _Vocabulary, ids: Mapping[str, int], pre: PreTokenization) -> Tokenizer:
    merges = []
    for merge in vocabulary.array("merges", str):
        left, space, right = merge.partition(" ")
        if not space or left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.fail(f"the merge {merge!r} joins or gives something that is no token")
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab=dict(ids), merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = make_pre_tokenizer(pre.patterns)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int] | None) -> None:
    """Declare control tokens as special, and user-defined ones as whole words."""
    if types is None:
        return
    special = [
        AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types, strict=True) if k == _CONTROL
    ]
    unknown = [
        AddedToken(t, normalized=False, special=True) for t, k in zip(tokens, types, strict=True) if k == _UNKNOWN
    ]
    whole = [AddedToken(t, normalized=False) for t, k in zip(tokens, types, strict=True) if k == _USER_DEFINED]
    tokenizer.add_special_tokens(special + unknown)
    tokenizer.add_tokens(whole)


def _add_ends(vocabulary: _Vocabulary, tokenizer: Tokenizer, tokens: list[str], add_bos: bool) -> None:
    """Make encoding add BOS and EOS where the metadata asks for it."""
    before, after = [], []
    if vocabulary.flag("add_bos_token", add_bos):
        before = [vocabulary.token_id("bos_token_id", len(tokens))]
    if vocabulary.flag("add_eos_token", False):
        after = [vocabulary.token_id("eos_token_id", len(tokens))]
    ends = [token_id for token_id in before + after if token_id is not None]
    if ends:
        single = [tokens[i] for i in before if i is not None] + ["$A"] + [tokens[i] for i in after if i is not None]
        special_tokens = [(tokens[token_id], token_id) for token_id in dict.fromkeys(ends)]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special_tokens)


def _chat_templates(header: GGUFHeader) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in header.metadata.items():
        if isinstance(value, str) and (key == prefix or key.startswith(prefix + ".")):
            templates[key.removeprefix(prefix).removeprefix(".") or "default"] = value
    return templates
