from __future__ import annotations

import pytest

from server.api.body import parse_object
from server.api.errors import ApiError


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"temperature": NaN}', "temperature"),
        (b'{"temperature": -Infinity}', "temperature"),
        (b'{"a": 1, "temperature": 1e999}', "temperature"),
        (b'{"prompt": "a\\ud800b"}', "prompt"),
        (b'{"prompt": ["fine", "\\udc00"]}', "prompt"),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": "\xed\xa0\x80"}', "prompt"),
        (b"\xef\xbb\xbf{}", None),
        (b"", None),
        (b"[]", None),
        (b'"text"', None),
        (b"null", None),
        (b"{", None),
        (b"{} {}", None),
        (b"[" * 100_000, None),
        (b'{"a":' * 5_000 + b"1" + b"}" * 5_000, None),
        (b'{"n": 1' + b"0" * 100_000 + b"}", None),
    ],
)
def test_what_is_not_strict_json_is_refused_with_the_field_if_there_is_one(body: bytes, param: str | None) -> None:
    with pytest.raises(ApiError) as refusal:
        parse_object(body)
    assert refusal.value.status == 400
    assert refusal.value.param == param
    assert "Error" not in refusal.value.message


def test_of_equal_keys_the_last_wins() -> None:
    assert parse_object(b'{"a": 1, "a": 2}') == {"a": 2}
