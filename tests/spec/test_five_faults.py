"""The five faults that this server was built against, replayed on real builds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from server.engine.attention.base import KernelPages
from server.engine.attention.registry import ATTENTION_BACKENDS
from server.engine.attention.torch import TorchAttention
from server.engine.attention.triton import TritonAttention
from server.engine.layers.linear import Linear
from server.engine.layers.moe import Experts
from server.engine.plan import check_plan
from server.engine.quantization.write import write_quantized
from server.errors import UserError
from server.messages import DraftCounts
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.override_models import draft_runner, held, modules, told
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import changed_copy, noisy_copy, self_draft, write_glm4_moe, write_llama

PROMPTS = [[1, 2, 3, 4, 5] * 4, [9, 8, 7]]
MTP = {"method": "mtp", "num_speculative_tokens": 2}
HEAD = "re:.*layers\\.3\\..*"
"""The MTP layer, as ignore lists name it."""


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_glm4_moe(tmp_path_factory.mktemp("faults") / "glm", moe_intermediate_size=32)


@pytest.fixture(scope="module")
def int4(glm: Path) -> Path:
    """A 4-bit target whose MTP layer was left as it was, and is listed so."""
    folder = glm.parent / "int4"
    write_quantized(glm, folder, [(None, "int4_g32")], ignore=["lm_head", HEAD])
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "llama", num_hidden_layers=2)


def answers(engine: Harness, new: int = 10) -> list[list[int]]:
    return engine.generate(PROMPTS, max_tokens=new)


def moe(engine: Harness) -> dict[str, str]:
    """By role, what all the experts' layers hold."""
    return {"target": held(engine.built.target)["moe"], "draft": held(draft_runner(engine))["moe"]}


# 1. The target's quantised-only kernel met the unquantised MTP head; the way out was dropped in silence.


@pytest.mark.parametrize(
    ("named", "resolved"), [("grouped_mm", "grouped_mm"), ("torch", "torch"), ("auto", "grouped_mm")]
)
def test_1_an_unquantised_head_beside_a_4_bit_target(named: str, resolved: str, int4: Path) -> None:
    plain = answers(make_engine(int4, moe_backend="torch_int4"))
    engine = make_engine(int4, MTP | {"moe_backend": named}, moe_backend="torch_int4")
    assert answers(engine) == plain
    assert engine.counts().drafted[1] > 0
    assert moe(engine) == {"target": "torch_int4", "draft": resolved}
    source = "auto" if named == "auto" else "explicit"
    assert told(engine, "draft")["moe"] == (named, resolved, source)
    assert told(engine, "target")["moe"] == ("torch_int4", "torch_int4", "explicit")
    assert told(engine, "draft")["quantization"] == ("unset", "none", "auto")


def test_1_unset_inherits_the_request_and_the_error_names_the_way_out(int4: Path) -> None:
    with pytest.raises(UserError) as caught:
        make_engine(int4, MTP, moe_backend="torch_int4")
    message = str(caught.value)
    assert message.startswith(
        "draft: speculative_config.moe_backend is unset, so it inherits the target's 'torch_int4'"
    )
    assert "unquantised experts (it takes 4-bit integer ones only, int4)" in message
    assert "Set speculative_config.moe_backend to auto or one of: grouped_mm, torch" in message


@pytest.mark.parametrize("requested", [None, "auto"])
def test_1_what_the_target_resolved_to_is_not_inherited(requested: str | None, int4: Path) -> None:
    engine = make_engine(int4, MTP, moe_backend=requested)
    assert moe(engine) == {"target": "torch_int4", "draft": "grouped_mm"}


def test_1_the_reverse_a_4_bit_draft_of_a_plain_target(glm: Path, tmp_path: Path) -> None:
    head = write_eagle3(glm, tmp_path / "head", boundaries=(0, 1, 2), sparse=True, moe_intermediate_size=32)
    write_quantized(head, tmp_path / "int4", [(None, "int4_g32")])
    draft = {"method": "eagle3", "model": tmp_path / "int4"}
    with pytest.raises(UserError, match=r"inherits the target's 'grouped_mm'.*auto or one of: torch_int4, torch"):
        make_engine(glm, draft, moe_backend="grouped_mm")
    engine = make_engine(glm, draft | {"moe_backend": "torch_int4"}, moe_backend="grouped_mm")
    assert moe(engine) == {"target": "grouped_mm", "draft": "torch_int4"}
    assert answers(engine) == answers(make_engine(glm, moe_backend="grouped_mm"))


# 2. The draft's attention backend was set after the layers had been built, or cleared when it was unset.


class OtherLayout(TorchAttention):
    """The same arithmetic; it only says that it keeps its pages another way round."""

    name = "triton"
    kv_layout = "HND"


class OddPages(TorchAttention):
    """The same arithmetic; it only says that it reads pages of 48 tokens."""

    name = "triton"
    kernel_pages = KernelPages(sizes=frozenset({48}))


@pytest.mark.parametrize("target", ["torch", "triton"])
@pytest.mark.parametrize(
    ("named", "resolved"), [("torch", "torch"), ("triton", "triton"), (None, "torch"), ("auto", "torch")]
)
def test_2_named_and_unset(target: str, named: str | None, resolved: str, llama: Path) -> None:
    draft = {"method": "draft_model", "model": llama, "attention_backend": named}
    engine = make_engine(llama, draft, attention_backend=target)
    assert (held(engine.built.target)["attention"], held(draft_runner(engine))["attention"]) == (target, resolved)
    assert told(engine, "draft")["attention"][:2] == (named or "unset", resolved)
    assert engine.generate([[5, 6, 7]], max_tokens=4) == make_engine(llama).generate([[5, 6, 7]], max_tokens=4)


@pytest.mark.parametrize(
    ("backend", "block_size", "reasons"),
    [
        (OtherLayout, 64, ["its KV layout is HND", "the target's torch keeps the same group as NHD"]),
        (OddPages, 64, ["no page size that divides --block-size 64", "48 tokens", "torch any multiple of 16"]),
    ],
)
def test_2_named_and_impossible(
    backend: type[TorchAttention], block_size: int, reasons: list[str], llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "triton", backend)
    draft = {"method": "draft_model", "model": llama}
    with pytest.raises(UserError) as caught:
        make_engine(llama, draft | {"attention_backend": "triton"}, block_size=block_size)
    message = str(caught.value)
    assert message.startswith("draft: speculative_config.attention_backend: 'triton' cannot serve")
    assert all(reason in message for reason in reasons) and "what would work: auto, torch" in message
    # Unset looks for one that can share, whichever way round.
    assert told(make_engine(llama, draft, block_size=block_size), "draft")["attention"] == ("unset", "torch", "auto")


def test_2_a_target_that_shares_with_nobody_leaves_its_draft_its_own_kind(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS, "triton", OtherLayout)
    draft = {"method": "draft_model", "model": llama}
    settings = make_engine(llama, draft, attention_backend="triton").settings
    rows = {(row.role, row.component): row for row in check_plan(settings).rows}
    assert rows["draft", "attention"].resolved == "triton"
    assert [name for name, _ in rows["draft", "attention"].rejected] == ["torch", "flashinfer"]


def test_2_a_draft_of_other_geometry_shares_no_group_and_no_pages(llama: Path, tmp_path: Path) -> None:
    """Its heads are too wide for triton, which is said; with another backend it has a group of its own."""
    wide = write_llama(
        tmp_path / "wide", num_hidden_layers=1, head_dim=512, num_attention_heads=1, num_key_value_heads=1
    )
    draft = {"method": "draft_model", "model": wide}
    with pytest.raises(UserError, match=r"^draft: .*attention_backend: 'triton' .*head dimension 512.*auto, torch$"):
        make_engine(llama, draft | {"attention_backend": "triton"})
    engine = make_engine(llama, draft, attention_backend="triton", block_size=256)
    assert [(group.pages.page_size, [m.role for m in group.members]) for group in engine.plan.kv_groups] == [
        (128, ["target"]),
        (256, ["draft"]),
    ]


# 3. The draft was read with the target's load settings.


def test_3_random_drafts_of_a_real_target_and_the_reverse(llama: Path) -> None:
    draft = {"method": "draft_model", "model": llama, "num_speculative_tokens": 2}
    plain = answers(make_engine(llama))
    same = make_engine(llama, draft)
    assert answers(same) == plain and same.counts().accepted == same.counts().drafted
    dummy = make_engine(llama, draft | {"load_format": "dummy"})
    assert answers(dummy) == plain and sum(dummy.counts().accepted) <= 1
    random_plain = answers(make_engine(llama, load_format="dummy"))
    reverse = make_engine(llama, draft | {"load_format": "safetensors"}, load_format="dummy")
    assert answers(reverse) == random_plain != plain and sum(reverse.counts().accepted) <= 1
    inherited = make_engine(llama, draft, load_format="dummy")
    assert answers(inherited) == random_plain and sum(inherited.counts().accepted) <= 1


def test_3_a_target_without_weight_files_and_a_head_with_them(glm: Path, tmp_path: Path) -> None:
    head = write_eagle3(glm, tmp_path / "head", boundaries=(0, 1, 2))
    draft = {"method": "eagle3", "model": head}
    engine = make_engine(glm, draft | {"load_format": "auto"}, load_format="dummy")
    fc = load_file(head / "model.safetensors")["fc.weight"]
    linear = next(layer for layer in modules(draft_runner(engine).model, Linear) if "fc" in layer.shards)
    assert bool((linear.weight == fc).all())
    assert told(engine, "draft")["load_format"] == ("auto", "safetensors", "auto")
    assert told(engine, "target")["load_format"][1] == "dummy"


# 4. A second vote over pages: the draft read other pages than the target had written.


def counted(target: Path, draft: dict[str, Any], **settings: Any) -> tuple[list[list[int]], DraftCounts]:
    engine = make_engine(target, draft | {"num_speculative_tokens": 3}, **settings)
    found = engine.generate([[(7 * i + i * i) % 251 for i in range(66)], [3, 1, 2]], max_tokens=5), engine.counts()
    # Everyone who reads or writes the cache has the group's page size.
    (group,) = engine.plan.kv_groups
    runners = (engine.built.target, draft_runner(engine))
    assert {runner.pages for runner in runners} == {group.pages}
    assert {runner.attention.cache.page_size for runner in runners} == {group.pages.page_size}
    return found


@pytest.mark.parametrize("backends", [("triton", "torch"), ("torch", "triton")])
def test_4_acceptance_at_every_position_is_the_same_at_any_block_size(
    backends: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = write_llama(tmp_path / "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    monkeypatch.setattr(TritonAttention, "kernel_pages", KernelPages(sizes=frozenset({16, 32, 64})))
    noisy = noisy_copy(llama, tmp_path / "noisy", 0.05)
    for model in (llama, noisy):
        draft = {"method": "draft_model", "model": model, "attention_backend": backends[1]}
        by_size = [counted(llama, draft, attention_backend=backends[0], block_size=size) for size in (64, 128, 256)]
        assert by_size[0] == by_size[1] == by_size[2]
        drafted, accepted = by_size[0][1].drafted, by_size[0][1].accepted
        assert (accepted == drafted) if model == llama else (sum(accepted) < sum(drafted))
        assert drafted[2] > 0


def test_4_the_page_is_the_largest_that_all_layers_of_the_group_can_read(llama: Path) -> None:
    draft = {"method": "draft_model", "model": llama}
    for target, head, page in (("torch", "torch", 256), ("triton", "torch", 128), ("torch", "triton", 128)):
        engine = make_engine(llama, draft | {"attention_backend": head}, attention_backend=target, block_size=256)
        assert [group.pages.page_size for group in engine.plan.kv_groups] == [page]
        assert [group.kernel_page_size for group in check_plan(engine.settings).kv_groups] == [page]


# 5. One flag for all layers of the MTP head, whose layers are quantised differently.


def test_5_mixed_precision_resolves_layer_by_layer(tmp_path: Path) -> None:
    plain = write_glm4_moe(tmp_path / "glm", moe_intermediate_size=32, num_nextn_predict_layers=2)
    target = tmp_path / "mixed"
    schemes = [("re:.*layers\\.4\\.mlp\\.experts\\..*", "int4_g32"), ("re:.*self_attn\\..*", "fp8_channel")]
    write_quantized(plain, target, [*schemes, (None, "int4_g32")], ignore=["lm_head", "re:.*(eh_proj|shared_).*", HEAD])
    engine = make_engine(target, MTP | {"moe_backend": "auto"}, moe_backend="torch_int4")
    assert answers(engine) == answers(make_engine(target, moe_backend="torch_int4"))
    first, second = draft_runner(engine).model.layers
    assert [layer.weight_format.label for layer in modules(first, Experts)] == ["none"]
    assert [layer.weight_format.label for layer in modules(second, Experts)] == ["int4_g32"]
    assert [layer.weight_format.label for layer in modules(first, Linear)].count("none") == len(modules(first, Linear))
    labels = {tuple(layer.shards): layer.weight_format.label for layer in modules(second, Linear)}
    assert labels["q_proj", "k_proj", "v_proj"] == labels["o_proj",] == "fp8_channel" and labels["eh_proj",] == "none"
    assert told(engine, "draft")["quantization"] == ("unset", "fp8_channel+int4_g32+none", "auto")
    assert held(draft_runner(engine))["quantization"] == "fp8_channel+int4_g32+none"
    # One backend has to serve both kinds of experts, and says so where it cannot.
    assert told(engine, "draft")["moe"] == ("auto", "torch", "auto")
    with pytest.raises(
        UserError, match=r"inherits the target's 'torch_int4', .*unquantised experts.*auto or one of: torch\."
    ):
        make_engine(target, MTP, moe_backend="torch_int4")


# Its kin from the public reports: c6 and c9.


def test_c6_an_unquantised_draft_does_not_inherit_the_targets_quantisation(int4: Path, glm: Path) -> None:
    engine = make_engine(int4, {"method": "draft_model", "model": glm, "num_speculative_tokens": 2})
    assert answers(engine) == answers(make_engine(int4))
    assert held(draft_runner(engine))["quantization"] == "none" == told(engine, "draft")["quantization"][1]
    assert held(engine.built.target)["quantization"] == "int4_g32+none" == told(engine, "target")["quantization"][1]


@pytest.mark.parametrize(
    "missing", [{"lm_head.weight"}, {"model.embed_tokens.weight"}, {"lm_head.weight", "model.embed_tokens.weight"}]
)
def test_c9_a_whole_draft_borrows_the_ends_that_it_lacks(missing: set[str], llama: Path, tmp_path: Path) -> None:
    bare = changed_copy(llama, tmp_path / "bare", lambda name, tensor: None if name in missing else tensor)
    engine = make_engine(llama, {"method": "draft_model", "model": bare, "num_speculative_tokens": 3})
    assert answers(engine) == answers(make_engine(llama))
    counts = engine.counts()
    assert counts.accepted == counts.drafted
    assert sum(counts.drafted) > 0
    target, draft = engine.built.target, draft_runner(engine)
    assert (draft.model.ends.lm_head is target.model.lm_head) == ("lm_head.weight" in missing)
    assert (draft.model.ends.embed_tokens is target.model.embed_tokens) == ("model.embed_tokens.weight" in missing)
    assert draft.model.num_parameters < target.model.num_parameters
    told_ends = {row for row in told(engine, "draft") if row in ("embedding", "head")}
    assert told_ends == {"head" if name == "lm_head.weight" else "embedding" for name in missing}


def test_c9_a_draft_of_another_width_cannot_borrow(llama: Path, tmp_path: Path) -> None:
    narrow = write_llama(tmp_path / "narrow", hidden_size=24)
    bare = changed_copy(narrow, tmp_path / "bare", lambda name, tensor: None if name == "lm_head.weight" else tensor)
    with pytest.raises(UserError, match=r"^draft: .*lacks lm_head\.weight.*width 24"):
        make_engine(llama, {"method": "draft_model", "model": bare})


def test_c9_heads_borrow_what_they_lack_and_draft_the_same(glm: Path, tmp_path: Path) -> None:
    """The MTP layer's ends are copies of the target's: without them it drafts what it drafted with them."""
    ends = ("embed_tokens.weight", "shared_head.head.weight")
    bare = changed_copy(
        glm, tmp_path / "bare", lambda name, tensor: None if name.removeprefix("model.layers.3.") in ends else tensor
    )
    own, borrowing = make_engine(glm, MTP), make_engine(bare, MTP)
    assert answers(own) == answers(borrowing)
    assert [row.drafts for plan in own.steps for row in plan.rows] == [
        row.drafts for plan in borrowing.steps for row in plan.rows
    ]
    assert sum(own.counts().drafted) > 0
    model = draft_runner(borrowing).model
    assert model.lm_head is None and model.embed_tokens is None
    assert model._ends.lm_head is borrowing.built.target.model.lm_head


@pytest.mark.parametrize("part", ["eh_proj.weight", "mlp.experts.1.up_proj.weight", "enorm.weight"])
def test_c9_nothing_else_may_be_missing_or_left_over(part: str, glm: Path, tmp_path: Path) -> None:
    name = f"model.layers.3.{part}"
    without = changed_copy(glm, tmp_path / "without", lambda n, tensor: None if n == name else tensor)
    with pytest.raises(UserError, match=r"^draft: speculative_config\.") as caught:
        make_engine(without, MTP)
    assert name in str(caught.value)
    more = self_draft(glm, tmp_path / "more")
    tensors = load_file(more / "model.safetensors")
    save_file(tensors | {f"model.layers.3.extra_{part}": tensors[name].clone()}, more / "model.safetensors")
    with pytest.raises(UserError, match=r"^draft: speculative_config\..*extra_"):
        make_engine(more, MTP)
