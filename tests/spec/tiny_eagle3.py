"""Tiny random EAGLE-3 heads as folders, in the dress of each producer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tests.spec.tiny_models import BASE, Random, config_of, decoder_layer, tensors_of, within, write_folder

Producer = Literal["eagle", "specforge", "angelslim", "modelopt", "speculators"]
DRAFT_VOCAB_SIZE = 96


def write_eagle3(
    target: Path,
    folder: Path,
    *,
    producer: Producer = "specforge",
    seed: int = 7,
    boundaries: Sequence[int] | None = (0, 1, 3),
    captured: int = 3,
    draft_vocab_size: int | None = DRAFT_VOCAB_SIZE,
    num_layers: int = 1,
    own_embedding: bool = False,
    own_head: bool = True,
    aux_norm: Literal["none", "chunks", "whole"] = "none",
    qwen: bool = False,
    sparse: bool = False,
    mask: bool = True,
    **options: Any,
) -> Path:
    """A head with random weights for a target folder.

    Args:
        target: a folder of `tiny_models`.
        folder: where to write.
        producer: whose names and config keys.
        seed: of the weights.
        boundaries: layer boundaries that it reads, written as the producer writes them; None leaves the list out.
        captured: how many they are.
        draft_vocab_size: Vd; None is the target's vocabulary, without maps.
        num_layers: its decoder layers.
        own_embedding: whether it holds an embedding of its own.
        own_head: whether it holds a head.
        aux_norm: norms before `fc`.
        qwen: norms on queries and keys.
        sparse: experts as Qwen3-MoE has them.
        mask: whether t2d is written (modelopt never does).
        options: keys of config.json, of the layer's config where the producer nests it, and sizes of the head.
    """
    random = Random(seed)
    theirs = config_of(target)
    shape: dict[str, Any] = {
        **BASE,
        "hidden_size": theirs["hidden_size"],
        "intermediate_size": 40,
        "model_type": "qwen3_moe" if sparse else "qwen3" if qwen else "llama",
        "num_hidden_layers": num_layers,
        "vocab_size": theirs["vocab_size"],
        **({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if sparse else {}),
        **options,
    }
    hidden, theirs_hidden, size = shape["hidden_size"], theirs["hidden_size"], draft_vocab_size or theirs["vocab_size"]
    first = "layers.0" if producer in ("modelopt", "speculators") else "midlayer"
    tensors = within(first, decoder_layer(random, shape, sparse=sparse, inputs=2 * hidden))
    tensors[f"{first}.hidden_norm.weight"] = random.norm(hidden)
    for index in range(1, num_layers):
        tensors |= within(f"layers.{index}", decoder_layer(random, shape, sparse=sparse))
    tensors["fc.weight"] = random.linear(hidden, captured * theirs_hidden)
    tensors["norm.weight"] = random.norm(hidden)
    if own_head:
        tensors["lm_head.weight"] = random.normal(size, hidden, scale=0.4)
    if own_embedding:
        tensors["embed_tokens.weight"] = random.normal(theirs["vocab_size"], hidden)
    if aux_norm == "chunks":
        tensors |= {f"fc_norm.{i}.weight": random.norm(theirs_hidden) for i in range(captured)}
    if aux_norm == "whole":
        tensors["input_norm.weight"] = random.norm(captured * theirs_hidden)
    if draft_vocab_size is not None:
        maps = vocabulary_maps(size, theirs["vocab_size"], seed)
        tensors |= maps if mask and producer != "modelopt" else {"d2t": maps["d2t"]}
    return write_folder(folder, _config(producer, shape, draft_vocab_size, boundaries, aux_norm), tensors)


def vocabulary_maps(size: int, vocab_size: int, seed: int) -> dict[str, Tensor]:
    """d2t (offsets) and t2d of `size` random ids, two neighbours among them."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.randperm(vocab_size - 2, generator=generator)[: size - 2] + 2).sort().values
    ids = torch.cat((torch.tensor([0, 1]), ids))
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[ids] = True
    return {"d2t": ids - torch.arange(size), "t2d": mask}


def reduced_head(target: Path, maps: Mapping[str, Tensor]) -> Tensor:
    """The rows of the target's head that a draft vocabulary keeps."""
    ids = maps["d2t"] + torch.arange(len(maps["d2t"]))
    return tensors_of(target)["lm_head.weight"][ids].clone()


def _config(
    producer: Producer,
    shape: Mapping[str, Any],
    draft_vocab_size: int | None,
    boundaries: Sequence[int] | None,
    aux_norm: str,
) -> dict[str, Any]:
    config = dict(shape)
    config.pop("rope_theta" if shape["rope_theta"] == BASE["rope_theta"] else "", None)  # as published heads do
    # Those that write outputs are told by a list that starts with 1.
    outputs = boundaries is not None and min(boundaries) == 2 and producer in ("specforge", "modelopt", "angelslim")
    listed = None if boundaries is None else [i - 1 if outputs else i for i in boundaries]
    ids = {} if listed is None else {"eagle_aux_hidden_state_layer_ids": listed}
    top = {"draft_vocab_size": draft_vocab_size} if draft_vocab_size or producer != "eagle" else {}
    norms = {"fc_norm": {"chunks": True}, "norm_before_fc": {"whole": True}}
    top |= {key: True for key, when in norms.items() if aux_norm in when}
    options = {key: config.pop(key) for key in ("norm_before_residual", "norm_output") if key in config}
    if producer == "eagle":
        return config | top | options | ids | {"architectures": ["LlamaForCausalLM"]}
    if producer == "angelslim":
        return config | top | options | ids | {"architectures": ["Eagle3LlamaForCausalLM"], "model_type": "llama"}
    if producer == "speculators":
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"name_or_path": None, "architectures": []},
            },
            "transformer_layer_config": config,
            "torch_dtype": "float32",
            **top,
            **options,
            **ids,
        }
    inner = {"eagle_config": {**ids, "use_aux_hidden_state": True}}
    return config | top | options | inner | {"architectures": ["LlamaForCausalLMEagle3"]}
