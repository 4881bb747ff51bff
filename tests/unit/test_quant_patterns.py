"""Names in the lists of quantisation metadata."""

from __future__ import annotations

import pytest

from server.engine.quantization.patterns import Pattern, names_of, patterns
from server.errors import UserError

EXACT = [
    ("lm_head", "lm_head", True),
    ("lm_head", "model.lm_head", False),
    ("model.layers.1.mlp", "model.layers.1.mlp.up_proj", False),
    ("re:.*lm_head", "lm_head", True),
    ("re:mtp", "model.mtp.fc", False),
    ("re:.*mtp", "model.mtp.fc", True),
    ("re:^mtp.*", "mtp.layers.0.mlp.up_proj", True),
    (r"re:model\.layers\.6\b", "model.layers.60.mlp.up_proj", False),
    ("re:model.layers.1", "model.layers.1.mlp.up_proj", True),  # match, not fullmatch
    ("*lm_head", "lm_head", False),
]
TREE = [
    ("lm_head", "lm_head", True),
    ("mlp.gate", "model.layers.3.mlp.gate", True),
    ("gate", "model.layers.3.mlp.gate", True),
    ("gate", "model.layers.3.mlp.gate_proj", False),
    ("proj", "model.layers.3.mlp.gate_proj", False),
    ("model.layers.6", "model.layers.6.mlp.up_proj", True),
    ("model.layers.6", "model.layers.60.mlp.up_proj", False),
    ("model.layers.6.mlp", "model.layers.6.mlp", True),
    ("re:.*gate", "model.layers.3.mlp.gate_proj", True),
]
GLOB = [
    ("lm_head", "lm_head", True),
    ("*lm_head", "model.lm_head", True),
    ("*lm_head*", "lm_head", True),
    ("model.layers.61*", "model.layers.61.self_attn.q_proj", True),
    ("model.layers.61*", "model.layers.61", True),
    ("model.layers.6*", "model.layers.60.self_attn.q_proj", False),
    ("model.layers.6.*", "model.layers.6.self_attn.q_proj", True),
    ("model.layers.6.*", "model.layers.60.self_attn.q_proj", False),
    ("mtp*", "mtp.layers.0.mlp.up_proj", True),
    ("*.mlp.gate*", "model.layers.1.mlp.gate", True),
    ("*.mlp.gate*", "model.layers.1.mlp.gate_proj", False),
    ("model.layers.?.mlp", "model.layers.7.mlp.up_proj", True),
    ("*", "anything.at.all", True),
    ("re:.*", "lm_head", False),
]


@pytest.mark.parametrize(
    ("style", "text", "name", "fits"),
    [(style, *case) for style, cases in (("exact", EXACT), ("tree", TREE), ("glob", GLOB)) for case in cases],
)
def test_matching(style: str, text: str, name: str, fits: bool) -> None:
    (pattern,) = patterns([text], style, "x")  # type: ignore[arg-type]
    assert pattern.matches([name]) is fits


def test_the_names_of_a_module() -> None:
    q = "layers.0.self_attn.q_proj"
    assert names_of(f"model.language_model.{q}", f"model.{q}") == {
        *(f"model.language_model.{q}", f"model.{q}"),
        *("model.language_model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.qkv_proj"),
    }
    up = "m.mlp.experts.7.up_proj"
    assert names_of(up, up) == {up, "m.mlp.experts.7.gate_up_proj", "m.mlp.experts.gate_up_proj"}
    down = "m.mlp.experts.7.down_proj"
    assert names_of(down, down) == {down, "m.mlp.experts.down_proj"}
    assert names_of("lm_head", "lm_head") == {"lm_head"}
    assert Pattern("m.self_attn.qkv_proj", "exact").matches(names_of("m.self_attn.k_proj", "m.self_attn.k_proj"))


@pytest.mark.parametrize("entries", ["lm_head", [1], {"a": 1}, [None]])
def test_a_list_that_is_none(entries: object) -> None:
    with pytest.raises(UserError, match=r"^here is .*; it must be a list of module names"):
        patterns(entries, "exact", "here")


def test_a_broken_regular_expression() -> None:
    with pytest.raises(UserError, match=r"here: 're:\(' is not a regular expression"):
        patterns(["re:("], "exact", "here")
    assert patterns(None, "exact", "here") == ()
