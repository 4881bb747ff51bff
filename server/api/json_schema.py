"""What a JSON schema in a request may hold: limits, and no keyword that would be ignored in silence."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Set
from functools import lru_cache
from typing import Any

import msgspec

MAX_BYTES = 256 * 1024
MAX_DEPTH = 64
MAX_SCHEMAS = 4096
MAX_ENUM_VALUES = 8192
MAX_PROPERTIES = 1024
"""Of one object."""
MAX_OPTIONAL = 480
"""Of one object: each may come next, and the parser follows all of them at once."""
MAX_UNKNOWN = 256
"""Different names."""
MAX_PATTERN_LENGTH = 4096
MAX_WHITESPACE = 32
"""Characters between two parts of an answer: a model that is stuck in blanks must come to an end."""
_FARTHEST = 2**63 - 1
"""Of an integer's bounds: one beyond would silently be taken for this one, and let wrong answers through."""

_ENFORCED = frozenset(
    (
        *("type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref"),
        *("properties", "patternProperties", "additionalProperties", "required", "minProperties", "maxProperties"),
        *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    )
)
_NOT_ENFORCED = frozenset(
    (
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "nullable", "x-guidance"),
    )
)
_NOTES = frozenset(
    (
        *("$schema", "$id", "id", "$anchor", "$comment", "$defs", "definitions", "$vocabulary", "title", "description"),
        *("default", "example", "examples", "deprecated", "readOnly", "writeOnly", "discriminator"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
    )
)
_HINTS = {"nullable": '; write "type": [..., "null"] instead', "x-guidance": ""}


def schema_text(schema: dict[str, Any] | bool) -> str:
    """The schema as JSON for the grammar, once it has been found to be within the limits.

    Raises:
        ValueError: what is wrong, where, and what would work.
    """
    if schema is False:
        raise ValueError("the schema false accepts nothing")
    size = len(msgspec.json.encode(schema))
    if size > MAX_BYTES:
        raise ValueError(f"the schema has {size} bytes as JSON; at most {MAX_BYTES} are allowed")
    _check(schema)
    blanks = {"whitespace_pattern": rf"[ \t\r\n]{{1,{MAX_WHITESPACE}}}"}
    return msgspec.json.encode(({} if schema is True else schema) | {"x-guidance": blanks}).decode()


def _check(root: dict[str, Any] | bool) -> None:
    unknown: set[str] = set()
    pending: list[tuple[str, object, int]] = [("", root, 1)]
    seen = values = 0
    while pending:
        path, schema, depth = pending.pop()
        seen += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"{path[:200]}: the schema is nested more than {MAX_DEPTH} deep")
        if seen > MAX_SCHEMAS:
            raise ValueError(f"the schema holds more than {MAX_SCHEMAS} schemas within it")
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise ValueError(f"{path or '/'}: a schema must be an object or a boolean")
        for keyword in schema:
            _check_keyword(path, keyword)
        unknown.update(schema.keys() - _ENFORCED - _NOTES)
        if len(unknown) > MAX_UNKNOWN:
            raise ValueError(f"{path or '/'}: the schema holds more than {MAX_UNKNOWN} keywords that are no keywords")
        _check_pattern(path, schema.get("pattern"))
        _check_bounds(path, schema)
        values += _count(path, "enum", schema.get("enum"))
        if values > MAX_ENUM_VALUES:
            raise ValueError(f"{path}/enum: the schema's enums hold more than {MAX_ENUM_VALUES} values together")
        pending += [(f"{path}/{place}", inner, depth + 1) for place, inner in _inside(path, schema)]


def _check_keyword(path: str, keyword: str) -> None:
    if keyword in _ENFORCED or keyword in _NOTES:
        return
    place = f"{path}/{keyword}"[:200]
    if keyword in _NOT_ENFORCED:
        raise ValueError(f"{place}: the keyword {keyword} is not supported{_HINTS.get(keyword, '')}")
    near = _nearest(keyword[:64])
    if near is not None:
        raise ValueError(f"{place}: there is no keyword {keyword[:64]!r} (did you mean {near!r}?)")


@lru_cache(1024)
def _nearest(keyword: str) -> str | None:
    """JSON Schema lets unknown keywords be notes; one that is nearly a rule was meant as one."""
    return next(iter(difflib.get_close_matches(keyword, _ENFORCED, 1, 0.8)), None)


def _check_pattern(path: str, pattern: object) -> None:
    if isinstance(pattern, str) and len(pattern) > MAX_PATTERN_LENGTH:
        raise ValueError(
            f"{path}/pattern: a pattern has {len(pattern)} characters; at most {MAX_PATTERN_LENGTH} are allowed"
        )


def _check_bounds(path: str, schema: dict[str, Any]) -> None:
    kind = schema.get("type")
    if kind != "integer" and not (isinstance(kind, list) and "integer" in kind):
        return
    for sign, names in ((1, ("minimum", "exclusiveMinimum")), (-1, ("maximum", "exclusiveMaximum"))):
        for name in names:
            bound = schema.get(name)
            if isinstance(bound, int | float) and sign * bound > _FARTHEST:
                raise ValueError(
                    f"{path}/{name}: {repr(bound)[:40]} is beyond 64 bits; an integer's bounds must lie within "
                    f"{-_FARTHEST} to {_FARTHEST}"
                )


def _count(path: str, keyword: str, value: object) -> int:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"{path}/{keyword}: must be a list")
    return len(value) if isinstance(value, list) else 0


def _inside(path: str, schema: dict[str, Any]) -> Iterator[tuple[str, object]]:
    """The schemas that a schema is made of, with where they are."""
    for keyword in ("additionalProperties", "additionalItems", "items"):
        if keyword in schema and not isinstance(schema[keyword], list):
            yield keyword, schema[keyword]
    for keyword in ("items", "prefixItems", "allOf", "anyOf", "oneOf"):
        inner = schema.get(keyword)
        if isinstance(inner, list):
            yield from ((f"{keyword}/{i}", one) for i, one in enumerate(inner))
    for keyword in ("properties", "patternProperties", "$defs", "definitions"):
        inner = schema.get(keyword)
        if isinstance(inner, dict):
            if len(inner) > MAX_PROPERTIES:
                raise ValueError(f"{path}/{keyword}: {len(inner)} entries; at most {MAX_PROPERTIES} are allowed")
            if keyword == "properties":
                _check_optional(path, inner.keys(), schema.get("required"))
            if keyword == "patternProperties":
                for pattern in inner:
                    _check_pattern(f"{path}/{keyword}", pattern)
            yield from ((f"{keyword}/{name}", one) for name, one in inner.items())


def _check_optional(path: str, names: Set[str], required: object) -> None:
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    optional = len(names - needed)
    if optional > MAX_OPTIONAL:
        raise ValueError(
            f"{path}/properties: {optional} of the properties are not required; at most {MAX_OPTIONAL} may be optional"
        )
