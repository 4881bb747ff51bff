"""EAGLE-3 heads of every producer against the arithmetic written out, fp32, through the paged attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_chains import TOLERANCE, check_chains
from draft_steps import PagedDraft, load_draft, load_target
from eagle3_reference import Eagle3Reference
from safetensors.torch import save_file
from torch import Tensor

from server.engine.models.decoder import CausalLM
from server.engine.models.draft import TargetHidden
from server.engine.models.eagle3 import Eagle3Draft
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import config_of, tensors_of, write_llama

WIDE = {"hidden_size": 24, "own_embedding": True}

CASES: dict[str, dict[str, Any]] = {
    "eagle": {"producer": "eagle"},
    "specforge": {"producer": "specforge"},
    "angelslim": {"producer": "angelslim", "qwen": True, "own_embedding": True, "tie_word_embeddings": True},
    "modelopt": {"producer": "modelopt"},
    "speculators": {"producer": "speculators", "qwen": True},
    "norm before residual": {"norm_before_residual": True},
    "norm output": {"norm_output": True, "producer": "speculators"},
    "chunk norms": {"aux_norm": "chunks", "norm_output": True},
    "whole norm": {"aux_norm": "whole"},
    "whole norm, speculators": {"aux_norm": "whole", "producer": "speculators", "norm_before_residual": True},
    "whole vocabulary": {"draft_vocab_size": None},
    "target's head": {"draft_vocab_size": None, "own_head": False},
    "target's head, own embedding": {"draft_vocab_size": None, "own_head": False, "own_embedding": True},
    "narrower than the target": {**WIDE, "num_attention_heads": 6, "head_dim": 8, "aux_norm": "chunks"},
    "embedding's head": {**WIDE, "own_head": False, "draft_vocab_size": None, "tie_word_embeddings": True},
    "own rope": {"rope_theta": 300.0, "head_dim": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-3},
    "biases": {"attention_bias": True},
    "three layers": {"num_layers": 3, "norm_before_residual": True},
    "experts": {"sparse": True, "norm_topk_prob": True},
    "two captured": {"captured": 2, "boundaries": (1, 3), "aux_norm": "chunks"},
    "four captured": {"captured": 4, "boundaries": (0, 1, 2, 3)},
}


def build(folder: Path, options: dict[str, Any]) -> tuple[CausalLM, PagedDraft, Eagle3Reference]:
    """A target, a head for it, and the head's reference."""
    target_folder = write_llama(folder / "target", rope_theta=77777.0)
    draft_folder = write_eagle3(target_folder, folder / "draft", **options)
    target = load_target(target_folder)
    tensors = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors_of(draft_folder).items()}
    theirs = tensors_of(target_folder)
    tensors.setdefault("embed_tokens.weight", theirs["model.embed_tokens.weight"])
    tied = options.get("tie_word_embeddings") and options.get("own_embedding")
    tensors.setdefault("lm_head.weight", tensors["embed_tokens.weight"] if tied else theirs["lm_head.weight"])
    config = config_of(draft_folder)
    config |= config.get("transformer_layer_config", {})
    reference = Eagle3Reference(
        {name: tensor.double() for name, tensor in tensors.items()}, config, options.get("rope_theta", 10000.0)
    )
    return target, load_draft(draft_folder, target), reference


def inputs(reference: Eagle3Reference, draft: PagedDraft) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """For two rows: the combined hidden states of random captured ones, checked, and ids."""
    generator = torch.Generator().manual_seed(3)
    hidden, ids = {}, {}
    for name, length in (("a", 37), ("b", 21)):
        aux = torch.randn(length, reference["fc.weight"].shape[1], generator=generator)
        hidden[name] = draft.model.combine(TargetHidden(torch.empty(length, 0), aux))
        assert float((hidden[name].double() - reference.combine(aux)).abs().max()) < TOLERANCE
        ids[name] = torch.randint(260, (length,), generator=generator).tolist()
    return hidden, ids


@torch.no_grad()
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_steps(options: dict[str, Any], tmp_path: Path) -> None:
    _, draft, reference = build(tmp_path, options)
    hidden, ids = inputs(reference, draft)
    check_chains(draft, reference.whole, hidden, ids)


@torch.no_grad()
@pytest.mark.parametrize("name", ["specforge", "target's head", "embedding's head", "whole vocabulary"])
def test_logits(name: str, tmp_path: Path) -> None:
    _, draft, reference = build(tmp_path, CASES[name])
    output = torch.randn(3, reference["norm.weight"].shape[0])
    expected = torch.stack([reference.logits(row.double()) for row in output])
    assert float((draft.model.logits(output).double() - expected).abs().max()) < TOLERANCE


@torch.no_grad()
def test_a_head_on_the_final_hidden_states(tmp_path: Path) -> None:
    target_folder = write_llama(tmp_path / "target")
    folder = write_eagle3(target_folder, tmp_path / "draft", use_aux_hidden_state=False, producer="eagle")
    tensors = tensors_of(folder)
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, folder / "model.safetensors")
    target = load_target(target_folder)
    draft = load_draft(folder, target)
    final = torch.randn(5, 32)
    assert torch.equal(draft.model.combine(TargetHidden(final)), final)
    # Steps leave the target's hidden states as they are: `step` checks it.
    draft.step({"a": (0, final, [1, 2, 3, 4, 5])}, 0)


def test_what_is_borrowed_stays_the_targets(tmp_path: Path) -> None:
    target, draft, _ = build(tmp_path, {"draft_vocab_size": None, "own_head": False})
    assert isinstance(draft.model, Eagle3Draft)
    own = {id(module) for module in draft.model.modules()}
    assert not own & {id(target.embed_tokens), id(target.lm_head)}
    assert draft.model.num_parameters == sum(t.numel() for t in draft.model.weight_targets().values())
