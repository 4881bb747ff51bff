"""Every field of every body with values that nobody planned for: refused at once, and felt by nobody else.

Which values a field may have is said by the OpenAPI document and judged by the jsonschema library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import psutil
import pytest
from live_server import LiveServer
from streaming_clients import Stream

MIB = 2**20
DEEP = 1000
NO_JSON = {
    "NaN": b"NaN",
    "infinity": b"Infinity",
    "minus infinity": b"-Infinity",
    "beyond floats": b"1e999",
    "a lone surrogate": b'"\\ud800"',
    "a lone surrogate inside": b'[{"a": ["\\udfff"]}]',
    "invalid UTF-8": b'"\xff\xfe"',
    "invalid UTF-8 inside": b'["a", "\xc3"]',
    "a half": b'["a", ',
}
JSON: tuple[Any, ...] = (
    True,
    False,
    0,
    -1,
    1.5,
    -0.0,
    1e308,
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    10**400,
    "",
    "x",
    "1",
    "x" * 100_000,
    [],
    [[]],
    [None],
    [-1],
    [10**30],
    ["x"] * 10_000,
    ["x" * 5000],
    {},
    {"x": 1},
    {"1": "x"},
    {"-1": 1},
    {"": None},
    {str(i): 1 for i in range(10_000)},
)
NESTED = [b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP]
BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}


def fields_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """The schemas of a body's fields."""
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return {name: field for part in schema.get("allOf", [schema]) for name, field in part["properties"].items()}


def attacks(path: str, fields: dict[str, Any]) -> Iterator[tuple[str, bytes, bool]]:
    """What is tried, the body, and whether it must be refused."""
    for name, schema in fields.items():
        rest = b"".join(
            b", " + json.dumps({key: value}).encode()[1:-1] for key, value in BODIES[path].items() if key != name
        )
        validator = jsonschema.Draft202012Validator(schema)
        for value in JSON:
            text = json.dumps(value).encode()
            refused = not validator.is_valid(value)
            yield f"{name} {text[:60]!r}", b'{"%s": %s%s}' % (name.encode(), text, rest), refused
        for kind, text in NO_JSON.items():
            yield f"{name} {kind}", b'{"%s": %s%s}' % (name.encode(), text, rest), True
        for text in NESTED:
            yield f"{name} {text[:20]!r}", b'{"%s": %s%s}' % (name.encode(), text, rest), False


def resident(server: LiveServer) -> list[int]:
    return [process.memory_info().rss for process in (psutil.Process(server.api_pid), server.engine)]


@pytest.mark.parametrize("path", BODIES)
def test_values_that_the_document_does_not_allow_are_refused(path: str, tiny: LiveServer) -> None:
    document = tiny_document(tiny)
    fields = fields_of(document, path)
    assert set(BODIES[path]) <= set(fields)
    beside = Stream(tiny, 400, temperature=0, return_token_ids=True)
    before = resident(tiny)
    with httpx.Client(base_url=tiny.url, timeout=60, trust_env=False) as client:
        for what, body, refused in attacks(path, fields):
            response = client.post(path, content=body, headers={"content-type": "application/json"})
            assert response.status_code in ((400, 404) if refused else (200, 400, 404)), (what, response.text[:300])
            if response.status_code != 200:
                error = response.json()["error"]
                assert error["message"] and set(error) == {"message", "type", "param", "code"}, what
                assert not any(word in error["message"] for word in ("Error", "Exception", "Traceback", "pydantic"))
    assert all(now - then < 64 * MIB for now, then in zip(resident(tiny), before, strict=True))
    ids = [t for event in beside.end()[:-1] for choice in event["choices"] for t in choice["token_ids"]]
    assert ids == tiny.token_ids("a", max_tokens=400, ignore_eos=True)
    assert "Traceback" not in tiny.log


def tiny_document(server: LiveServer) -> dict[str, Any]:
    document: dict[str, Any] = httpx.get(server.url + "/openapi.json", trust_env=False).json()
    return document


def large_bodies(size: int) -> Iterator[tuple[str, bytes, int]]:
    """What is tried, a body of about `size` bytes, the status of the answer."""
    ids = size // 4
    yield "token ids", b'{"prompt": [' + b"123," * ids + b"1]}", 400
    yield "lists of token ids", b'{"prompt": [' + b"[1]," * ids + b"[1]]}", 400
    yield "a text", b'{"prompt": "' + b"abc " * ids + b'"}', 400
    yield "a text of quotes", b'{"prompt": "' + b'\\"\\"' * ids + b'"}', 400
    yield "texts", b'{"prompt": [' + b'"",' * ids + b'"a"]}', 400
    yield "an unknown field of lists", b'{"prompt": "a", "x": [' + b"[ ]," * ids + b"[]]}", 400
    yield "an unknown field of objects", b'{"prompt": "a", "x": [' + b"{ }," * ids + b"{}]}", 400
    yield "fields", b'{"prompt": "a"' + b',"":1' * (size // 5) + b"}", 400
    yield "brackets", b"[" * size, 400
    yield "blanks", b" " * size, 400
    yield "zeros", b"\x00" * size, 400
    yield "an unknown text", b'{"prompt": "a", "max_tokens": 1, "x": "' + b"abc " * ids + b'"}', 200


@pytest.mark.parametrize("size", [MIB, pytest.param(32 * MIB - 100, marks=pytest.mark.slow)])
def test_large_bodies_cost_no_memory_that_stays(size: int, tiny: LiveServer) -> None:
    beside = Stream(tiny, 600, temperature=0, return_token_ids=True)
    figures = []
    for _ in range(5):
        for what, body, status in large_bodies(size):
            headers = {"content-type": "application/json"}
            response = httpx.post(
                tiny.url + "/v1/completions", content=body, headers=headers, timeout=120, trust_env=False
            )
            assert response.status_code == status, (what, response.text[:300])
        figures.append(resident(tiny))
    # What the first two rounds left to the allocator the others use again.
    assert all(last - second < 32 * MIB for second, last in zip(figures[1], figures[4], strict=True)), figures
    ids = [t for event in beside.end()[:-1] for choice in event["choices"] for t in choice["token_ids"]]
    assert ids == tiny.token_ids("a", max_tokens=600, ignore_eos=True)
