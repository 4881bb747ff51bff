"""SentencePiece BPE vocabularies of GGUF files (`tokenizer.ggml.model` llama: Llama 2, Mistral, TinyLlama)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers

_SPACE = "\u2581"


def sentencepiece_tokenizer(
    ids: Mapping[str, int], scores: Sequence[float], unknown_id: int | None, add_space_prefix: bool
) -> Tokenizer:
    """Build a tokenizer that joins, like SentencePiece, the neighbours whose union has the highest score.

    Args:
        ids: token to id.
        scores: by id.
        unknown_id: token for what neither the vocabulary nor its byte tokens can write.
        add_space_prefix: whether a space is put before the text (and taken off again when decoding).
    """
    unknown = next((token for token, index in ids.items() if index == unknown_id), None)
    model = models.BPE(
        vocab=dict(ids), merges=_merges(ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if add_space_prefix else replace
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges(ids: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """All pairs of tokens whose union is a token, best union first: the scores written as merge ranks."""
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                ranked.append((-scores[index], ids[left], ids[right], (left, right)))
    ranked.sort()
    return [pair for _, _, _, pair in ranked]
