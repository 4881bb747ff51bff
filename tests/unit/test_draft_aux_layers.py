"""Which hidden states an EAGLE-3 head reads: the two conventions, the default, and what the user says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.models.aux_layers import KEY, aux_layers
from server.errors import UserError


def listed(ids: list[int] | None, inner: bool = False) -> dict[str, Any]:
    return {"eagle_config": {KEY: ids}} if inner else {KEY: ids}


@pytest.mark.parametrize("config", [{}, listed(None), listed([]), listed([], True), {"eagle_config": None}])
def test_the_default(config: dict[str, Any]) -> None:
    found = aux_layers(config, 32)
    assert found.boundaries == (2, 16, 29)
    assert "N = 32" in found.why


@pytest.mark.parametrize(
    ("ids", "layers", "boundaries", "rule"),
    [
        ([2, 16, 29], 32, (2, 16, 29), "boundaries"),
        ([1, 15, 28], 32, (2, 16, 29), "outputs"),
        ([1, 29, 57], 61, (2, 30, 58), "outputs"),
        ([1, 17, 33], 36, (2, 18, 34), "outputs"),
        ([24, 30, 36], 36, (24, 30, 36), "boundaries"),
        # Layer 36 has no output where there are 36 layers, so these can only be boundaries.
        ([1, 17, 36], 36, (1, 17, 36), "boundaries"),
        ([29, 2, 16], 32, (2, 16, 29), "boundaries"),
        ([0, 4], 4, (0, 4), "boundaries"),
    ],
)
@pytest.mark.parametrize("inner", [True, False])
def test_lists(ids: list[int], layers: int, boundaries: tuple[int, ...], rule: str, inner: bool) -> None:
    found = aux_layers(listed(ids, inner), layers)
    assert found.boundaries == boundaries
    assert rule in found.why
    assert str(ids) in found.why


def test_the_list_inside_wins_and_an_empty_one_does_not() -> None:
    assert aux_layers(listed([3, 4, 5]) | listed([6, 7, 8], True), 32).boundaries == (6, 7, 8)
    assert aux_layers(listed([3, 4, 5]) | listed([], True), 32).boundaries == (3, 4, 5)


def test_what_the_user_says_wins_and_means_boundaries() -> None:
    found = aux_layers(listed([2, 16, 29]), 32, override=[17, 1, 32])
    assert found.boundaries == (1, 17, 32)
    assert "asked for" in found.why


@pytest.mark.parametrize("ids", [[2, 2, 5], [2, 5, 33], [-1, 5, 6], [0, 40]])
def test_numbers_out_of_range_or_twice(ids: list[int]) -> None:
    with pytest.raises(UserError, match=rf"{KEY}.*0 to 32.*aux_hidden_state_layers"):
        aux_layers(listed(ids), 32)
    with pytest.raises(UserError, match=r"^speculative_config\.aux_hidden_state_layers.*0 to 32"):
        aux_layers({}, 32, ids)


@pytest.mark.parametrize("ids", ["2,3", 4, [2, "3"], [True, 2], [1.5], {"a": 1}])
def test_no_list_of_numbers(ids: Any) -> None:
    with pytest.raises(UserError, match="list of layer numbers"):
        aux_layers({KEY: ids}, 32)


@given(st.integers(1, 200))
def test_the_default_rises_or_is_refused(layers: int) -> None:
    if layers < 7:
        with pytest.raises(UserError, match=f"target of {layers} layers"):
            aux_layers({}, layers)
    else:
        low, middle, high = aux_layers({}, layers).boundaries
        assert 0 <= low < middle < high <= layers
