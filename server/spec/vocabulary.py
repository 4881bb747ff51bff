"""Whether a draft speaks its target's language: the same ids for the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from server.checkpoint.tokenizer import load_tokenizer
from server.engine.setup import ModelSetup
from server.errors import UserError

Vocabulary = Mapping[str, int]


def shared_vocab_size(
    target: ModelSetup, draft: ModelSetup, tokenizer: str | None = None, download_dir: str | None = None
) -> int:
    """Ids that a target and a draft that is a whole model both know.

    Embeddings may be padded to different sizes; the tokenizers then have to say that the tokens are the same.

    Args:
        target: the target's setup.
        draft: the draft's.
        tokenizer: what the user named in place of the target's own.
        download_dir: cache of hub downloads for `tokenizer`.

    Raises:
        UserError: the vocabularies differ, naming both sizes.
    """
    sizes = (target.layers.vocab_size, draft.layers.vocab_size)
    ours, theirs = _vocabulary(target, tokenizer, download_dir), _vocabulary(draft)
    if ours is None or theirs is None:
        if sizes[0] != sizes[1]:
            raise UserError(_differ(sizes, "and without both tokenizers it cannot be told whether that is padding"))
        return sizes[0]
    if ours != theirs:
        token = next(token for token in [*ours, *theirs] if ours.get(token) != theirs.get(token))
        raise UserError(_differ(sizes, _tokens_differ(ours, theirs, token)))
    known = max(ours.values(), default=-1) + 1
    if min(sizes) < known:
        raise UserError(_differ(sizes, f"and the tokenizer has {known} tokens"))
    return min(sizes)


def check_tokens_of_head(
    target: ModelSetup, draft: ModelSetup, tokenizer: str | None = None, download_dir: str | None = None
) -> None:
    """Compare the tokenizer that lies beside a head, if one does, with its target's.

    A head's embedding and output are the target's size whatever its tokenizer says, and special tokens are often
    renamed while one is trained: only tokens with other ids are a fault.

    Raises:
        UserError: a token has another id.
    """
    ours, theirs = _vocabulary(target, tokenizer, download_dir), _vocabulary(draft)
    if ours is None or theirs is None:
        return
    token = next((token for token, index in theirs.items() if ours.get(token, index) != index), None)
    if token is not None:
        sizes = (target.layers.vocab_size, draft.layers.vocab_size)
        raise UserError(_differ(sizes, _tokens_differ(ours, theirs, token)))


def _vocabulary(setup: ModelSetup, override: str | None = None, download_dir: str | None = None) -> Vocabulary | None:
    try:
        files = load_tokenizer(setup.checkpoint, override, download_dir=Path(download_dir) if download_dir else None)
    except UserError:
        return None  # a folder without a tokenizer: only the sizes can be compared
    return files.tokenizer.get_vocab()


def _tokens_differ(ours: Vocabulary, theirs: Vocabulary, token: str) -> str:
    return (
        f"and the tokenizers of {len(ours)} and {len(theirs)} tokens differ: {token!r} is "
        f"{ours.get(token, 'no token')} for the target and {theirs.get(token, 'no token')} for the draft"
    )


def _differ(sizes: tuple[int, int], how: str) -> str:
    return (
        f"draft: speculative_config.model has another vocabulary: the target embeds {sizes[0]} tokens, the draft "
        f"{sizes[1]}, {how}. A draft must have its target's tokenizer."
    )
