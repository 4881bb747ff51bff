"""Fields that bind an answer to a language: what the engine gets, and what is refused, how fast and at what cost."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import psutil
import pytest
from api_server import Api, serve_api

from server.messages import Grammar

PATHS = ("/v1/completions", "/v1/chat/completions")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
HELD = SCHEMA | {"x-guidance": {"whitespace_pattern": r"[ \t\r\n]{1,32}"}}


def full(path: str) -> dict[str, Any]:
    prompt = {"prompt": "Hi"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "Hi"}]}
    return {**prompt, "max_tokens": 8}


async def grammars(api: Api, path: str, **body: Any) -> list[Grammar | None]:
    before = len(api.engine.requests)
    response = await api.http.post(path, json=full(path) | body)
    assert response.status_code == 200, response.text
    return [request.params.grammar for request in api.engine.requests[before:]]


def named(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


async def test_every_way_to_ask_reaches_the_engine() -> None:
    async with serve_api() as api:
        for path in PATHS:
            for body in (
                {"response_format": named(SCHEMA, strict=True, description=None)},
                {"structured_outputs": {"json": SCHEMA, "regex": None}},
                {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            ):
                (grammar,) = await grammars(api, path, **body)
                assert grammar is not None and grammar.kind == "json_schema"
                assert json.loads(grammar.text) == HELD
            (grammar,) = await grammars(api, path, response_format={"type": "json_object"})
            assert grammar is not None and json.loads(grammar.text)["type"] == "object"
            regex, lark = r"\d{3}-[a-f]+", 'start: "a" <|im_end|> | /b+/'
            assert await grammars(api, path, structured_outputs={"regex": regex}) == [Grammar("regex", regex)]
            assert await grammars(api, path, structured_outputs={"grammar": lark}) == [Grammar("lark", lark)]
            chosen = await grammars(api, path, structured_outputs={"choice": ["yes", 'no"\n', "yes"]}, n=2)
            assert chosen == [Grammar("lark", 'start: "yes" | "no\\"\\n"')] * 2
            for free in (
                {"response_format": {"type": "text"}},
                {"response_format": None},
                {"structured_outputs": None},
            ):
                assert await grammars(api, path, **free) == [None]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": "json_object"}, "response_format", "must be an object"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    (
        {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
        "response_format.json_schema",
        "only",
    ),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema", ""),
    ({"response_format": named([])}, "response_format.json_schema.schema", "an object"),
    ({"response_format": named({"not": {}})}, "response_format.json_schema.schema", "/not"),
    ({"response_format": named({"type": "strin"})}, "response_format.json_schema.schema", "strin"),
    ({"response_format": named({"minLength": 4, "maxLength": 3, "type": "string"})}, "…schema", "minLength (4)"),
    ({"response_format": named({"$ref": "#/$defs/nope"})}, "…schema", "nope"),
    ({"response_format": named({"$ref": "#"})}, "…schema", "$ref leads back to itself before anything is written"),
    ({"structured_outputs": {"grammar": "start: start"}}, "…grammar", "a rule or $ref leads back to itself"),
    ({"response_format": named({"type": "integer", "minimum": 10**18})}, "…schema", "bounds of at most 18 digits"),
    ({"response_format": named({"type": "number", "maximum": -1e20})}, "…schema", "a number with minimum none and"),
    ({"response_format": named({"minimun": 3})}, "…schema", "(did you mean 'minimum'?)."),
    ({"response_format": named({"$ref": "file:///etc/passwd"})}, "…schema", "does not fetch"),
    ({"response_format": named({"type": "string", "format": "iri"})}, "…schema", "format: iri"),
    ({"response_format": named({"oneOf": [{"type": "integer"}, {"type": "number"}]})}, "…schema", "use anyOf"),
    ({"structured_outputs": {}}, "structured_outputs", "got none"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got regex, choice"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", ""),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
    ({"structured_outputs": {"regex": "a(?=b)"}}, "structured_outputs.regex", "look-around"),
    ({"structured_outputs": {"regex": "a{5000}"}}, "structured_outputs.regex", "at most 4096"),
    ({"structured_outputs": {"regex": "(){3}"}}, "structured_outputs.regex", "empty"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", ""),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "list of strings"),
    ({"structured_outputs": {"choice": ["a", 5]}}, "structured_outputs.choice", "list of strings"),
    ({"structured_outputs": {"choice": [f"c{i}" for i in range(5000)]}}, "structured_outputs.choice", "4096"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "JSON schema"),
    ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar", ""),
    ({"structured_outputs": {"grammar": "start: <|nobody|>"}}, "structured_outputs.grammar", "special token"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs", "leave"),
]


async def test_what_cannot_hold_is_refused_by_name() -> None:
    async with serve_api() as api:
        for path in PATHS:
            for body, param, says in REFUSED:
                response = await api.http.post(path, json=full(path) | body)
                error = response.json()["error"]
                assert response.status_code == 400, (body, response.text)
                assert error["param"].endswith(param.removeprefix("…")), (body, error)
                assert says in error["message"], error
                assert len(error["message"]) < 600 and "?." not in error["message"]
        assert not api.engine.requests


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


EXPLODING: list[dict[str, Any]] = [
    {"regex": "(" * 2000 + "a" + ")" * 2000},
    {"regex": r"(\p{L}{1,4000}){1,4000}("},
    {"regex": "a{99999999999999999999}"},
    {"json": {"type": "integer", "multipleOf": 1234567}},
    {"json": {"allOf": [{"anyOf": [{"type": "integer", "minimum": i * j} for j in range(10)]} for i in range(10)]}},
    {"json": deep(300)},  # deeper ones are refused as bodies, before anybody looks at the field
    {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}},
    {"json": {"enum": [f"value {i}" for i in range(10_000)]}},
    {"json": {f"keyword{i}": i for i in range(10_000)}},
    {"json": {"type": "object", "patternProperties": {f"^{'ab' * i}.*": {} for i in range(40)}}},
    {"grammar": "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "x"'},
    {"grammar": "start: " + "(" * 20_000 + '"x"' + ")" * 20_000},
    {"grammar": 'start: %json {"type": "integer", "multipleOf": 7654321}'},
    {"choice": ["x" * 100_000]},
]


@pytest.mark.parametrize("asked", EXPLODING, ids=lambda asked: next(iter(asked)) + str(len(str(asked))))
async def test_what_is_built_to_explode_is_refused_and_leaves_memory_and_others_alone(asked: dict[str, Any]) -> None:
    async with serve_api() as api:
        process = psutil.Process()
        await grammars(api, PATHS[0], structured_outputs={"regex": "a+"})
        before = process.memory_info().rss
        response, other = await asyncio.gather(
            api.http.post(PATHS[0], json=full(PATHS[0]) | {"structured_outputs": asked}),
            grammars(api, PATHS[1], structured_outputs={"regex": "ab+"}),
        )
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"].startswith("structured_outputs")
        assert other == [Grammar("regex", "ab+")]
        assert await grammars(api, PATHS[0], structured_outputs={"regex": "abc+"})
        assert process.memory_info().rss - before < 64 * 2**20
