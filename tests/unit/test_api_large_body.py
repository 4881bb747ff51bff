"""Large bodies: cut apart and put together they are what a JSON decoder makes of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import server.api.large_body as large_body
from server.api.body import parse_object
from server.api.errors import ApiError
from server.api.large_body import MAX_LISTS, MAX_NUMBERS, MAX_VALUES, split_body

numbers = st.lists(st.integers(), max_size=12)
texts = st.text(alphabet='a"\\[],{}:1é', max_size=6)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
objects = st.dictionaries(texts, values | numbers | st.lists(numbers, max_size=5), max_size=5)


@given(objects, st.sampled_from([None, 1]), st.booleans())
def test_nothing_is_lost_or_changed(value: dict[str, Any], indent: int | None, ascii_only: bool) -> None:
    body = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_body, "_LONG", 4)
        large = split_body(body)
    assert json.loads(large.rest) | large.lists == value


@pytest.mark.parametrize(
    "text",
    ["[1,,2]", "[1,2,]", "[,1]", "[1 2]", "[[1],,[2]]", "[[1],[2],]", "[[1][2]]", "[[1,],[2]]", "[1.5,2]", "[[1],2]"],
)
def test_what_is_no_list_of_whole_numbers_stays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_body, "_LONG", 1)
    body = b'{"a": "b", "prompt": ' + text.encode() + b"}"
    large = split_body(body)
    assert (large.rest, large.lists) == (body, {})


def test_of_equal_keys_the_last_counts() -> None:
    ids = b"[" + b"7," * 50_000 + b"7]"
    assert parse_object(b'{"prompt": ' + ids + b', "prompt": "x"}') == {"prompt": "x"}
    assert len(parse_object(b'{"prompt": "x", "prompt": ' + ids + b"}")["prompt"]) == 50_001


@pytest.mark.parametrize(
    "body",
    [
        b'{"x": [' + b"{}," * MAX_VALUES + b"{}]}",
        b'{"prompt": [' + b"1," * MAX_NUMBERS + b"1]}",
        b'{"prompt": [' + b"[1]," * (5 * MAX_LISTS) + b"[1]]}",
        b'{"x": {"y": [' + b"1," * MAX_VALUES + b"1]}}",
        b'{"prompt": "' + b'\\"' * 3_000_000 + b'"}',
        b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"prompt": "' + b"x" * 100_000,
    ],
)
def test_too_much_of_anything_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        parse_object(body)
    assert caught.value.status == 400


def test_a_long_text_may_hold_what_it_likes() -> None:
    text = ',"[{\\' * 200_000
    assert parse_object(json.dumps({"prompt": text, "n": 1}).encode()) == {"prompt": text, "n": 1}
