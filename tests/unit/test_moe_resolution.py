"""Which backend a request resolves to, and what the user reads when it cannot."""

from __future__ import annotations

import pytest
import torch

from server.engine.attention.base import AttentionNeed, Unsupported
from server.engine.attention.registry import resolve_attention_backend
from server.engine.backends import resolve
from server.engine.moe.base import MoENeed
from server.engine.moe.registry import resolve_moe_backend
from server.errors import UserError

CPU_NEED = MoENeed(torch.device("cpu"), torch.bfloat16, 8, 2, 64, 32)
ATTENTION_NEED = AttentionNeed(torch.device("cpu"), torch.float32, torch.float32, 4, 2, 16)
VERDICTS = {"fast": Unsupported("it wants a GPU"), "fine": None, "slow": None}


@pytest.mark.parametrize("requested", [None, "auto", "AUTO"])
def test_auto_takes_the_first_that_can_serve_and_says_who_cannot(requested: str | None) -> None:
    name, why, rejected = resolve("--x", requested, VERDICTS, {})
    assert (name, rejected) == ("fine", [("fast", "it wants a GPU")])
    assert why


@pytest.mark.parametrize("requested", ["slow", "SLOW", "Other_Spelling"])
def test_a_named_backend_is_honoured(requested: str) -> None:
    assert resolve("--x", requested, VERDICTS, {"other_spelling": "slow"}).name == "slow"


def test_a_named_backend_that_cannot_serve_is_an_error_with_the_way_out() -> None:
    with pytest.raises(UserError, match=r"^--x: 'FAST' .* it wants a GPU; what would work: auto, fine, slow$"):
        resolve("--x", "FAST", VERDICTS, {})


def test_a_name_that_this_build_lacks_lists_what_exists() -> None:
    with pytest.raises(UserError, match=r"no backend 'fsat' in this build; it has fast, fine, slow; what would work"):
        resolve("--x", "fsat", VERDICTS, {})


def test_nothing_can_serve() -> None:
    with pytest.raises(UserError, match=r"no backend can serve this model \(a: one; b: two\)"):
        resolve("--x", None, {"a": Unsupported("one"), "b": Unsupported("two")}, {})
    with pytest.raises(UserError, match="no backend of this build would work"):
        resolve("--x", "a", {"a": Unsupported("one")}, {})


@pytest.mark.parametrize("requested", ["torch", "GROUPED_MM"])
def test_moe_names(requested: str) -> None:
    assert resolve_moe_backend(requested, CPU_NEED).name == requested.lower()


def test_moe_errors_name_the_setting() -> None:
    integers = MoENeed(torch.device("cpu"), torch.int8, 8, 2, 64, 32)
    with pytest.raises(UserError, match=r"^speculative_config\.moe_backend: 'grouped_mm' .*int8"):
        resolve_moe_backend("grouped_mm", integers, "speculative_config.moe_backend")


@pytest.mark.parametrize("requested", [None, "auto", "torch", "Torch", "TORCH_SDPA"])
def test_attention_names(requested: str | None) -> None:
    assert resolve_attention_backend(requested, ATTENTION_NEED).name == "torch"


@pytest.mark.parametrize("requested", ["FLASH_ATTN", "torch "])
def test_attention_backends_that_do_not_exist(requested: str) -> None:
    with pytest.raises(UserError, match=r"--attention-backend: there is no backend .*it has torch"):
        resolve_attention_backend(requested, ATTENTION_NEED)
