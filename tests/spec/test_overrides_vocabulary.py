"""A draft with another vocabulary is refused with both sizes; a padded embedding with the same tokenizer is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from server.errors import UserError
from tests.spec.engine_harness import make_engine
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import (
    VOCAB_SIZE,
    config_of,
    mtp_alone,
    self_draft,
    tensors_of,
    tiny_tokenizer,
    write_glm4_moe,
    write_llama,
)

PROMPT = [1, 2, 3, 4, 5, 6, 7]
ENDS = ("model.embed_tokens.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("vocabulary") / "llama", num_hidden_layers=2)


def resized(target: Path, folder: Path, vocab_size: int) -> Path:
    """A copy with its own tokenizer, whose embedding and head have more rows (which would always win) or fewer."""
    self_draft(target, folder)
    tensors = tensors_of(target)
    for name in ENDS:
        rows = tensors[name]
        padding = torch.full((max(0, vocab_size - len(rows)), rows.shape[1]), 9.0)
        tensors[name] = torch.cat((rows, padding))[:vocab_size].contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(target) | {"vocab_size": vocab_size}))
    return folder


def tokenizer_of(vocabulary: dict[str, int]) -> str:
    text = json.loads(tiny_tokenizer().to_str())
    text["model"]["vocab"] = {token: index for token, index in vocabulary.items() if len(token) == 1 or token[0] != "<"}
    text["added_tokens"] = [token | {"id": vocabulary[token["content"]]} for token in text["added_tokens"]]
    return json.dumps(text)


def permuted() -> str:
    """The same tokens, two of them with their ids swapped."""
    vocabulary = tiny_tokenizer().get_vocab()
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    return tokenizer_of(vocabulary)


def longer(more: int) -> str:
    vocabulary = tiny_tokenizer().get_vocab()
    return tokenizer_of(vocabulary | {chr(0x4E00 + i): VOCAB_SIZE + i for i in range(more)})


def draft(model: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": model, "num_speculative_tokens": 3}


@pytest.mark.parametrize("padded", [0, 4, 64])
def test_padding_is_no_other_vocabulary(padded: int, target: Path, tmp_path: Path) -> None:
    engine = make_engine(target, draft(resized(target, tmp_path / "draft", VOCAB_SIZE + padded)))
    assert engine.generate([PROMPT], max_tokens=12) == make_engine(target).generate([PROMPT], max_tokens=12)
    assert engine.counts().accepted == engine.counts().drafted != [0, 0, 0]


def test_a_padded_target_and_a_draft_without_padding(target: Path, tmp_path: Path) -> None:
    padded = resized(target, tmp_path / "target", VOCAB_SIZE + 64)
    tensors = tensors_of(padded)
    tensors["lm_head.weight"][VOCAB_SIZE:] = 0  # the engine samples no padding; this harness would
    save_file(tensors, padded / "model.safetensors")
    engine = make_engine(padded, draft(target))
    # Ids of the padding are in the target's range, so a client may send them.
    prompts = [PROMPT, [*PROMPT, VOCAB_SIZE + 40, 5], [VOCAB_SIZE + 63]]
    assert engine.generate(prompts, max_tokens=6) == make_engine(padded).generate(prompts, max_tokens=6)
    assert engine.counts().accepted[0] > 0


@pytest.mark.parametrize(
    ("change", "tokenizer"), [(-64, "same"), (64, "longer"), (0, "permuted"), (64, "permuted"), (-64, "permuted")]
)
def test_another_vocabulary_is_refused_with_both_sizes(
    change: int, tokenizer: str, target: Path, tmp_path: Path
) -> None:
    model = resized(target, tmp_path / "draft", VOCAB_SIZE + change)
    if tokenizer != "same":
        (model / "tokenizer.json").write_text(permuted() if tokenizer == "permuted" else longer(change))
    with pytest.raises(UserError) as caught:
        make_engine(target, draft(model))
    message = str(caught.value)
    assert message.startswith("draft: speculative_config.model ")
    assert f"the target embeds {VOCAB_SIZE} tokens, the draft {VOCAB_SIZE + change}" in message
    assert ("'A' is" in message or "'B' is" in message) == (tokenizer == "permuted")


def test_without_tokenizers_only_equal_sizes_will_do(target: Path, tmp_path: Path) -> None:
    for change, name in ((0, "same"), (64, "more")):
        model = resized(target, tmp_path / name, VOCAB_SIZE + change)
        (model / "tokenizer.json").unlink()
        if change:
            with pytest.raises(UserError, match=r"260 tokens, the draft 324, and without both tokenizers"):
                make_engine(target, draft(model))
        else:
            assert make_engine(target, draft(model)).generate([PROMPT], max_tokens=2)


def test_the_tokenizer_that_the_user_names_is_the_targets(target: Path, tmp_path: Path) -> None:
    other = self_draft(target, tmp_path / "other")
    (other / "tokenizer.json").write_text(permuted())
    with pytest.raises(UserError, match="another vocabulary"):
        make_engine(target, draft(target), tokenizer=str(other))
    assert make_engine(target, draft(other), tokenizer=str(other)).plan.draft is not None


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_a_head_beside_another_tokenizer(method: str, target: Path, tmp_path: Path) -> None:
    glm = write_glm4_moe(tmp_path / "glm")
    head = (
        mtp_alone(glm, tmp_path / "head")
        if method == "mtp"
        else write_eagle3(glm, tmp_path / "head", boundaries=(0, 1, 2))
    )
    keys = {"method": method, "model": head}
    assert make_engine(glm, keys).plan.draft is not None
    (head / "tokenizer.json").write_text(permuted())
    with pytest.raises(UserError, match=r"^draft: speculative_config\.model has another vocabulary: .*'[AB]' is"):
        make_engine(glm, keys)
    # Special tokens may have been renamed since, and a head often has no tokenizer at all.
    (head / "tokenizer.json").write_text(tiny_tokenizer().to_str().replace("<|pad|>", "<|fill|>"))
    assert make_engine(glm, keys).plan.draft is not None
    (head / "tokenizer.json").unlink()
    assert make_engine(glm, keys).plan.draft is not None


@pytest.mark.parametrize("change", [-64, 64])
def test_a_head_for_another_embedding_names_both_sizes(change: int, tmp_path: Path) -> None:
    glm = write_glm4_moe(tmp_path / "glm")
    alone = mtp_alone(glm, tmp_path / "alone", vocab_size=VOCAB_SIZE + change)
    with pytest.raises(
        UserError, match=rf"^draft: .*vocab_size {VOCAB_SIZE + change} is not the target's {VOCAB_SIZE}"
    ):
        make_engine(glm, {"method": "mtp", "model": alone})
    other = write_llama(tmp_path / "other", vocab_size=VOCAB_SIZE + change)
    head = write_eagle3(other, tmp_path / "head", boundaries=(0, 1, 2), own_embedding=True)
    with pytest.raises(UserError, match=rf"^draft: .*{VOCAB_SIZE + change} tokens.*{VOCAB_SIZE}"):
        make_engine(glm, {"method": "eagle3", "model": head})


def test_the_tokenizers_of_these_tests_are_what_they_say() -> None:
    plain, swapped = tiny_tokenizer().get_vocab(), Tokenizer.from_str(permuted()).get_vocab()
    assert {token for token in plain if plain[token] != swapped[token]} == {"A", "B"} and len(plain) == len(swapped)
    assert len(Tokenizer.from_str(longer(64)).get_vocab()) == VOCAB_SIZE + 64
