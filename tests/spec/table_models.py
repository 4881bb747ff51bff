"""Models built by hand whose every answer is known: the next token is a table's entry for the token d slots back.

A token is known by a code of ±1. Queries and keys are constant, so that only the rotary phase between two positions
counts: one KV head sees exactly the slot d back and copies its token's code, the head turns the code into the table's
entry. Where a cache page is wrong, the token is lost.

The drafts are built the same way, with two more things in their hidden state:
- a marker of the depth. At depth j (the j-th token of a draft, from 0) the tokens of `wrong[j]` have a false entry.
- the code that the hidden state brings along minus the one that belongs to the token it is joined with: nothing as
  long as the two belong together, else it spoils the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.spec.tiny_models import BASE, GLM4_MOE, LLAMA, within, write_folder

VOCAB = 64
BITS = 16
HIDDEN = 64
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
LENGTH = 1024
LAYERS = 3
# Where things lie in a hidden state.
CODE, FOUND = slice(0, BITS), slice(BITS, 2 * BITS)
ONE = 2 * BITS
MARKS = slice(ONE + 1, ONE + 17)
ASIDE = slice(BITS, 2 * BITS)
"""In a head's embedding: the code of the token whose entry this token is."""
NEVER = -100.0
EPS = 1e-5


@dataclass(frozen=True)
class Table:
    """The rule: a token is `entry` of the token d + 1 before it."""

    entry: tuple[int, ...]
    back: int
    """d, slots from the newest token to the one that decides on the next."""

    def after(self, tokens: Sequence[int]) -> int:
        return self.entry[tokens[-1 - self.back]]

    def continued(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(self.after(tokens))
        return tokens[len(prompt) :]

    @property
    def origin(self) -> list[int]:
        """The inverse of `entry`."""
        return sorted(range(VOCAB), key=self.entry.__getitem__)


def table(back: int, seed: int = 0) -> Table:
    """One cycle through all tokens, so that no answer repeats itself before all have been there."""
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed)).tolist()
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return Table(tuple(following[token] for token in range(VOCAB)), back)


def codes() -> Tensor:
    """[V, BITS] of ±1; two differ in 6 places or more."""
    chosen: list[int] = []
    for word in range(2**BITS):
        if all((word ^ other).bit_count() >= 6 for other in chosen):
            chosen.append(word)
        if len(chosen) == VOCAB:
            break
    return torch.tensor([[1.0 if word >> bit & 1 else -1.0 for bit in range(BITS)] for word in chosen])


def write_table_target(folder: Path, rule: Table, *, wrong: Sequence[int] = (), layers: int = LAYERS) -> Path:
    """A Llama; as a draft model, with a false entry for the tokens in `wrong`."""
    config = LLAMA | shape() | {"num_hidden_layers": layers}
    return write_folder_without_tokenizer(folder, config, target_tensors(rule, layers, dense_block, wrong, o_bias=True))


def write_table_glm(folder: Path, rule: Table, wrong: Sequence[Sequence[int]], *, layers: int = 1) -> Path:
    """The same as a GLM-4.5, with an MTP layer whose tables have false entries, `wrong[j]` at depth j."""
    options = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "n_shared_experts": 0}
    options |= {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "use_qk_norm": False}
    config = GLM4_MOE | shape() | options | {"num_hidden_layers": layers}
    tensors = target_tensors(rule, layers, sparse_block, ()) | within(f"model.layers.{layers}", mtp_layer(rule, wrong))
    return write_folder_without_tokenizer(folder, config, tensors)


def write_table_eagle3(
    folder: Path, rule: Table, wrong: Sequence[Sequence[int]], *, unknown: Sequence[int] = ()
) -> Path:
    """An EAGLE-3 head for `write_table_target`, which cannot draft the tokens in `unknown`."""
    ids = torch.tensor([token for token in range(VOCAB) if token not in unknown])
    fc = torch.zeros(HIDDEN, 3 * HIDDEN)
    # The boundaries 1, 2 and 3 hold the same; what 2 adds, 3 takes away.
    for boundary, share in ((0, 1.0), (1, 1.0), (2, -1.0)):
        at = boundary * HIDDEN
        fc[FOUND, at + FOUND.start : at + FOUND.stop] = share * torch.eye(BITS)
        fc[MARKS.start, at + ONE] = share
    hidden = BITS + 1
    embedded = 2 * BITS
    value = torch.zeros(KV_HEADS, HEAD_DIM, 2 * HIDDEN)
    value[0, :BITS, CODE] = torch.eye(BITS) / scale(embedded)
    value[1, :BITS, ASIDE] = torch.eye(BITS) / scale(embedded)
    value[1, BITS:, HIDDEN + MARKS.start : HIDDEN + MARKS.stop] = torch.eye(16) / scale(hidden)
    out = torch.zeros(KV_HEADS, HIDDEN, HEAD_DIM)
    out[0, FOUND, :BITS] = torch.eye(BITS)
    out[1, FOUND, :BITS] = -torch.eye(BITS)
    out[1, MARKS, BITS:] = torch.eye(16).roll(1, 0) - torch.eye(16)
    layer = attention(rule.back, value, out, 2 * HIDDEN)
    tensors = within("midlayer", layer | dense_block() | norms("hidden_norm"))
    tensors |= {
        "fc.weight": fc,
        "norm.weight": torch.ones(HIDDEN),
        "embed_tokens.weight": draft_embedding(rule),
        "lm_head.weight": draft_head(rule, wrong)[ids],
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True),
    }
    config = BASE | shape() | {"num_hidden_layers": 1, "model_type": "llama", "draft_vocab_size": len(ids)}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    # The list starts with 1, so it would be read as layers' outputs; the last boundary says what it is.
    return write_folder_without_tokenizer(folder, config, tensors)


def shape() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 8,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "attention_bias": True,
        "rms_norm_eps": EPS,
        "max_position_embeddings": LENGTH,
    }


def target_tensors(
    rule: Table, layers: int, block: Callable[[], dict[str, Tensor]], wrong: Sequence[int], *, o_bias: bool = False
) -> dict[str, Tensor]:
    """The first layer looks; what follows adds nothing."""
    embedding = torch.zeros(VOCAB, HIDDEN)
    embedding[:, CODE] = codes()
    embedding[:, ONE] = 1
    head = torch.zeros(VOCAB, HIDDEN)
    head[:, FOUND] = codes()[rule.origin]
    head[[rule.entry[token] for token in wrong], ONE] = NEVER
    tensors = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head,
    }
    value = torch.zeros(KV_HEADS, HEAD_DIM, HIDDEN)
    value[0, :BITS, CODE] = torch.eye(BITS) / scale(BITS + 1)
    out = torch.zeros(KV_HEADS, HIDDEN, HEAD_DIM)
    out[0, FOUND, :BITS] = torch.eye(BITS)
    for index in range(layers):
        layer = attention(rule.back, value, out if index == 0 else 0 * out, HIDDEN)
        if o_bias:
            layer["self_attn.o_proj.bias"] = torch.zeros(HIDDEN)
        tensors |= within(f"model.layers.{index}", layer | block())
    return tensors


def mtp_layer(rule: Table, wrong: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    hidden, embedded = scale(2 * BITS + 1), scale(2 * BITS)
    project = torch.zeros(HIDDEN, 2 * HIDDEN)
    project[CODE, CODE] = torch.eye(BITS) / embedded
    project[FOUND, ASIDE] = -torch.eye(BITS) / embedded
    project[FOUND, HIDDEN + FOUND.start : HIDDEN + FOUND.stop] = torch.eye(BITS) / hidden
    # The target's hidden state has its one where a marker of depth -1 would lie.
    for depth in range(16):
        project[MARKS.start + depth, HIDDEN + ONE + depth] = 1 / hidden
    value = torch.zeros(KV_HEADS, HEAD_DIM, HIDDEN)
    value[0, :BITS, CODE] = torch.eye(BITS) / scale(BITS + 1)
    out = torch.zeros(KV_HEADS, HIDDEN, HEAD_DIM)
    out[0, FOUND, :BITS] = torch.eye(BITS)
    return {
        **attention(rule.back, value, out, HIDDEN),
        **sparse_block(),
        **norms("enorm", "hnorm", "shared_head.norm"),
        "eh_proj.weight": project,
        "embed_tokens.weight": draft_embedding(rule),
        # Its marker has moved on by one less than EAGLE-3's when the head reads it.
        "shared_head.head.weight": draft_head(rule, wrong, moved=0),
    }


def draft_embedding(rule: Table) -> Tensor:
    embedding = torch.zeros(VOCAB, HIDDEN)
    embedding[:, CODE] = codes()
    embedding[:, ASIDE] = codes()[rule.origin]
    return embedding


def draft_head(rule: Table, wrong: Sequence[Sequence[int]], moved: int = 1) -> Tensor:
    """The target's head, but for the false entries: at depth j, marked by j + moved, all others come before these."""
    head = torch.zeros(VOCAB, HIDDEN)
    head[:, FOUND] = codes()[rule.origin]
    for depth, tokens in enumerate(wrong):
        head[[rule.entry[token] for token in tokens], MARKS.start + depth + moved] = NEVER
    return head


def attention(back: int, value: Tensor, out: Tensor, inputs: int) -> dict[str, Tensor]:
    """One decoder layer's attention and norms.

    Args:
        back: slots back that KV head 0 looks; head 1 looks at its own slot.
        value: [KV_HEADS, HEAD_DIM, inputs].
        out: [KV_HEADS, HIDDEN, HEAD_DIM], shared evenly by the query heads of a KV head.
        inputs: width of what the attention reads.
    """
    groups = HEADS // KV_HEADS
    queries = torch.zeros(HEADS, HEAD_DIM)
    keys = torch.zeros(KV_HEADS, HEAD_DIM)
    for kv_head, slots in enumerate((back, 0)):
        angles = slots * frequencies()
        keys[kv_head] = torch.cat((angles.cos(), angles.sin()))
        strength = 50 * math.sqrt(HEAD_DIM) / smallest_gap(slots)
        queries[kv_head * groups : (kv_head + 1) * groups, : HEAD_DIM // 2] = strength
    shared = (out / groups).repeat_interleave(groups, 0)
    tensors = {
        "q_proj.weight": torch.zeros(HEADS * HEAD_DIM, inputs),
        "q_proj.bias": queries.flatten(),
        "k_proj.weight": torch.zeros(KV_HEADS * HEAD_DIM, inputs),
        "k_proj.bias": keys.flatten(),
        "v_proj.weight": value.flatten(0, 1),
        "v_proj.bias": torch.zeros(KV_HEADS * HEAD_DIM),
        "o_proj.weight": shared.permute(1, 0, 2).flatten(1),
    }
    return within("self_attn", tensors) | norms("input_layernorm", "post_attention_layernorm")


def frequencies() -> Tensor:
    """fp64 [HEAD_DIM / 2]."""
    return 1 / BASE["rope_theta"] ** (torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)


def smallest_gap(back: int) -> float:
    """How much less any other slot scores than the one looked at, for queries and keys of length 1 in each pair."""
    others = torch.tensor([slots - back for slots in range(LENGTH) if slots != back], dtype=torch.float64)
    return float((1 - (others[:, None] * frequencies()).cos()).sum(-1).min())


def scale(squares: int) -> float:
    """What a norm multiplies a hidden state by whose squares add up to so much."""
    return 1 / math.sqrt(squares / HIDDEN + EPS)


def norms(*names: str) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.ones(HIDDEN) for name in names}


def dense_block() -> dict[str, Tensor]:
    """A feed-forward block that adds nothing."""
    tensors = {"gate_proj.weight": torch.ones(8, HIDDEN), "up_proj.weight": torch.ones(8, HIDDEN)}
    return within("mlp", tensors | {"down_proj.weight": torch.zeros(HIDDEN, 8)})


def sparse_block() -> dict[str, Tensor]:
    """The same with experts."""
    tensors = {"gate.weight": torch.eye(2, HIDDEN), "gate.e_score_correction_bias": torch.zeros(2)}
    for i in range(2):
        tensors |= {name.replace("mlp", f"experts.{i}"): tensor for name, tensor in dense_block().items()}
    return within("mlp", tensors)


def write_folder_without_tokenizer(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """The tiny tokenizer has more tokens than these models."""
    write_folder(folder, config, {name: tensor.clone() for name, tensor in tensors.items()})
    (folder / "tokenizer.json").unlink()
    return folder
