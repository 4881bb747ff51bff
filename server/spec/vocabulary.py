"""Whether a draft model speaks its target's language: the same ids for the same tokens."""

from __future__ import annotations

from server.checkpoint.tokenizer import load_tokenizer
from server.engine.setup import ModelSetup
from server.errors import UserError


def shared_vocab_size(target: ModelSetup, draft: ModelSetup) -> int:
    """Ids that both models know.

    Embeddings may be padded to different sizes; the tokenizers then have to say that the tokens are the same.

    Raises:
        UserError: the vocabularies differ, naming both sizes.
    """
    sizes = (target.layers.vocab_size, draft.layers.vocab_size)
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if ours is None or theirs is None:
        if sizes[0] != sizes[1]:
            raise UserError(_differ(sizes, "and without both tokenizers it cannot be told whether that is padding"))
        return sizes[0]
    if ours != theirs:
        token = next(token for token in [*ours, *theirs] if ours.get(token) != theirs.get(token))
        raise UserError(
            _differ(
                sizes,
                f"and the tokenizers of {len(ours)} and {len(theirs)} tokens differ: {token!r} is "
                f"{ours.get(token, 'no token')} for the target and {theirs.get(token, 'no token')} for the draft",
            )
        )
    known = max(ours.values(), default=-1) + 1
    if min(sizes) < known:
        raise UserError(_differ(sizes, f"and the tokenizer has {known} tokens"))
    return min(sizes)


def _vocabulary(setup: ModelSetup) -> dict[str, int] | None:
    try:
        return load_tokenizer(setup.checkpoint).tokenizer.get_vocab()
    except UserError:
        return None  # a folder without a tokenizer: only the sizes can be compared


def _differ(sizes: tuple[int, int], how: str) -> str:
    return (
        f"draft: speculative_config.model has another vocabulary: the target embeds {sizes[0]} tokens, the draft "
        f"{sizes[1]}, {how}. A draft model must have its target's tokenizer."
    )
