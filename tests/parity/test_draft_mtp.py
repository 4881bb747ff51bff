"""MTP layers against transformers' GLM-4.5 layer and norms, fp32 against fp64, through the paged attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from draft_chains import TOLERANCE, Whole, check_chains
from draft_steps import PagedDraft, load_draft, load_target, read_config
from safetensors.torch import save_file
from torch import Tensor
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm, Glm4MoeRotaryEmbedding

from server.checkpoint.headers import read_headers
from server.checkpoint.locate import locate
from server.engine.loading.load import load_weights
from server.engine.models.decoder import CausalLM
from server.engine.models.draft import TargetHidden
from server.engine.models.mtp import MTPDraft
from server.engine.models.mtp_config import MTPConfig
from server.errors import UserError
from tests.spec.tiny_models import changed_copy, config_of, mtp_alone, tensors_of, write_glm4_moe

CASES: dict[str, dict[str, Any]] = {
    "own ends": {},
    "borrowed ends": {"mtp_ends": False},
    "as Air": {"use_qk_norm": False, "routed_scaling_factor": 1.0},
    "groups": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_shared_experts": 2},
    "no shared expert, no bias": {"n_shared_experts": 0, "attention_bias": False, "rope_theta": 500.0},
    "two layers": {"num_nextn_predict_layers": 2},
    "three layers": {"num_nextn_predict_layers": 3, "mtp_ends": False},
    "dense target": {"first_k_dense_replace": 3},
}


class Reference:
    """One MTP layer of a checkpoint, in fp64, over all slots at once."""

    def __init__(self, config: Glm4MoeConfig, tensors: dict[str, Tensor], embedding: Tensor) -> None:
        self.tensors = tensors
        self.embedding = embedding.double()
        self.eps = config.rms_norm_eps
        self.rotary = Glm4MoeRotaryEmbedding(config)
        self.layer = Glm4MoeDecoderLayer(config, layer_idx=config.num_hidden_layers - 1).double().eval()
        loaded = {}
        for name, empty in self.layer.state_dict().items():
            if not empty.numel():  # a shared expert of width 0
                loaded[name] = empty
            else:
                loaded[name] = _experts(name, tensors) if ".experts." in name else tensors[name].double()
        self.layer.load_state_dict(loaded)

    def __call__(self, hidden: Tensor, ids: list[int]) -> Tensor:
        embedded = self.embedding[torch.tensor(ids)]
        both = torch.cat((self._norm("enorm", embedded), self._norm("hnorm", hidden)), -1)
        x = (both @ self.tensors["eh_proj.weight"].double().T)[None]
        mask = torch.full((len(ids), len(ids)), float("-inf"), dtype=torch.float64).triu(1)[None, None]
        angles = self.rotary(x, torch.arange(len(ids))[None])
        out = self.layer(x, attention_mask=mask, position_embeddings=angles)
        return self._norm("shared_head.norm", (out if isinstance(out, Tensor) else out[0])[0])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        norm = Glm4MoeRMSNorm(x.shape[-1], self.eps)
        # Its own forward rounds to fp32 on the way; that is below the tolerance.
        norm.weight.data = self.tensors[f"{name}.weight"].double()
        normed: Tensor = norm(x)
        return normed


def _experts(name: str, tensors: dict[str, Tensor]) -> Tensor:
    """transformers stacks experts, gate above up."""
    parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
    count = len({key.split(".")[2] for key in tensors if key.startswith("mlp.experts.")})
    each = (torch.cat([tensors[f"mlp.experts.{i}.{part}.weight"] for part in parts]) for i in range(count))
    return torch.stack(list(each)).double()


def reference(folder: Path) -> Whole:
    """Step j runs layer j, or the last; each sees all slots so far as its own inputs."""
    config = config_of(folder)
    first, tensors = config["num_hidden_layers"], tensors_of(folder)
    hf = Glm4MoeConfig(**{key: value for key, value in config.items() if key not in ("architectures", "model_type")})
    hf._attn_implementation = "eager"
    layers = []
    for index in range(first, first + config["num_nextn_predict_layers"]):
        start = f"model.layers.{index}."
        own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        hf.first_k_dense_replace = 0  # always experts
        layers.append(Reference(hf, own, tensors["model.embed_tokens.weight"]))

    def whole(hidden: Tensor, ids: list[int], step: int) -> tuple[Tensor, Tensor]:
        last = layers[min(step, len(layers) - 1)](hidden, ids)[-1]
        return last, last

    return whole


def rows() -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """For two rows: the target's final hidden states, random, and ids."""
    generator = torch.Generator().manual_seed(3)
    lengths = {"a": 37, "b": 21}
    hidden = {name: torch.randn(length, 32, generator=generator) for name, length in lengths.items()}
    ids = {name: torch.randint(260, (length,), generator=generator).tolist() for name, length in lengths.items()}
    return hidden, ids


def embedded(folder: Path, **options: Any) -> tuple[Path, CausalLM, PagedDraft]:
    """A target with MTP layers behind it, and its draft."""
    target_folder = write_glm4_moe(folder / "target", **options)
    target = load_target(target_folder)
    return target_folder, target, load_draft(target_folder, target)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_steps(options: dict[str, Any], tmp_path: Path) -> None:
    folder, _, draft = embedded(tmp_path, **options)
    hidden, ids = rows()
    check_chains(draft, reference(folder), {n: draft.model.combine(TargetHidden(h)) for n, h in hidden.items()}, ids)


@torch.no_grad()
def test_the_layers_of_a_folder_of_their_own(tmp_path: Path) -> None:
    target_folder = write_glm4_moe(tmp_path / "target", mtp_ends=False)
    target = load_target(target_folder)
    alone = mtp_alone(target_folder, tmp_path / "mtp", architectures=["Glm4MoeMTPModel"])
    hidden, ids = rows()
    check_chains(load_draft(alone, target, moe="grouped_mm"), reference(target_folder), hidden, ids)


@torch.no_grad()
@pytest.mark.parametrize("mtp_ends", [True, False])
def test_logits_come_from_the_head(mtp_ends: bool, tmp_path: Path) -> None:
    folder, _, draft = embedded(tmp_path, mtp_ends=mtp_ends)
    output = torch.randn(3, 32)
    expected = output.double() @ tensors_of(folder)["lm_head.weight"].double().T
    assert float((draft.model.logits(output).double() - expected).abs().max()) < TOLERANCE
    assert (draft.model.target_ids is None) and isinstance(draft.model, MTPDraft)
    assert (draft.model.lm_head is not None) == mtp_ends


@pytest.mark.parametrize("options", [{}, {"mtp_ends": False}, {"num_nextn_predict_layers": 2}])
def test_target_and_draft_share_the_file_without_gaps_or_overlap(options: dict[str, Any], tmp_path: Path) -> None:
    folder, target, draft = embedded(tmp_path, **options)
    for name in tensors_of(folder):
        own = int(name.split(".")[2]) >= 3 if name.startswith("model.layers.") else False
        assert target.ignored_weight(name) == own
        assert draft.model.ignored_weight(name) or own
    # Later layers' copies of embedding and head are left aside by both; nothing else is.
    aside = {n for n in tensors_of(folder) if target.ignored_weight(n) and draft.model.ignored_weight(n)}
    assert {name.split(".", 3)[3] for name in aside} == (
        {"embed_tokens.weight", "shared_head.head.weight"} if "num_nextn_predict_layers" in options else set()
    )


def test_a_missing_or_unknown_tensor_stops_the_start(tmp_path: Path) -> None:
    folder, target, draft = embedded(tmp_path)
    lacking = changed_copy(folder, tmp_path / "lacking", lambda n, t: None if n == "model.layers.3.enorm.weight" else t)
    with pytest.raises(UserError, match=r"lacks tensor model\.layers\.3\.enorm\.weight"):
        load_draft(lacking, target)
    for extra in ("model.layers.3.surprise.weight", "model.layers.4.enorm.weight", "surprise.weight"):
        more = changed_copy(folder, tmp_path / extra, lambda n, t: t)
        save_file(tensors_of(folder) | {extra: torch.zeros(1)}, more / "model.safetensors")
        with pytest.raises(UserError, match=extra):
            load_weights(draft.model, locate(str(more)), "auto", 0, lambda done, total: None)


def test_stripped_layers_are_named(tmp_path: Path) -> None:
    folder = write_glm4_moe(tmp_path / "target")
    stripped = changed_copy(folder, tmp_path / "stripped", lambda n, t: None if n.startswith("model.layers.3.") else t)
    target = load_target(stripped)
    assert not any("eh_proj" in name for name in read_headers(locate(str(stripped))))
    with pytest.raises(UserError, match=r"no MTP weights: the config promises 1, but .*model\.layers\.3\.eh_proj"):
        MTPConfig.read(config_of(stripped), read_headers(locate(str(stripped))), target.config)
    assert read_config(folder, target.config).notes[0] == "MTP layers: 1, from model.layers.3"
