"""Large JSON bodies, decoded so that the event loop gets its turns.

A JSON decoder written in C lets no other thread run before it is through: two million token ids take it 50 ms, as many
small arrays half a second. So the long lists of numbers in a body, which prompts of token ids are, are cut out and
decoded piece by piece, and what remains may hold only so many values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from server.api.errors import invalid

MAX_VALUES = 100_000
"""Values in a body beside its long lists of token ids."""
MAX_NUMBERS = 4_000_000
"""Token ids in one long list, or list of lists."""
MAX_LISTS = 4096
_LONG = 64 * 1024
"""Bytes from which a list of numbers is decoded apart."""
_AT_ONCE = 2 * 1024 * 1024
"""Bytes in which something is counted at once, which takes milliseconds."""
_MAX_QUOTES = 2_000_000
_SHORT = 16
_MOST_KNOWN = 256

_decoder = msgspec.json.Decoder(list[int])

NumberList = list[int] | list[list[int]]


@dataclass(frozen=True)
class LargeBody:
    """A body without its long lists of whole numbers."""

    rest: bytes
    """The body with null in the place of each list."""
    lists: dict[str, NumberList]
    """By the top-level field that holds it."""


def split_body(body: bytes) -> LargeBody:
    """Cut the long lists of whole numbers out. Raises `ApiError` 400 when the body holds too much of something."""
    if _count(body, b'"', 0, len(body)) > _MAX_QUOTES:
        raise invalid(f"The body holds more than {_MAX_QUOTES} quotation marks.", code="body_too_complex")
    pieces: list[bytes] = []
    lists: dict[str, NumberList] = {}
    taken, depth, values, name = 0, 0, 0, b""
    known: dict[bytes, tuple[int, int]] = {}
    for start, end, string in _between_strings(body):
        found = _find_list(body, start, end) if depth == 1 and end - start >= _LONG else None
        if found is not None:
            first, last = found
            numbers = _decode(body, first, last)
            field = _field_name(name)
            if numbers is not None and field is not None:
                lists[field] = numbers
                pieces += (body[taken:first], b"null")
                taken, start = last, last
        # Between strings stands nearly always the same: a comma, a colon.
        marks = known.get(body[start:end]) if end - start <= _SHORT else None
        if marks is None:
            opened = _count(body, b"[", start, end) + _count(body, b"{", start, end)
            closed = _count(body, b"]", start, end) + _count(body, b"}", start, end)
            marks = (opened - closed, opened + _count(body, b",", start, end))
            if end - start <= _SHORT and len(known) < _MOST_KNOWN:
                known[body[start:end]] = marks
        depth += marks[0]
        values += marks[1]
        if values > MAX_VALUES:
            raise invalid(
                f"The body holds more than {MAX_VALUES} values beside lists of token ids.", code="body_too_complex"
            )
        name = string
    return LargeBody(b"".join([*pieces, body[taken:]]), lists)


def _count(body: bytes, mark: bytes, start: int, end: int) -> int:
    return sum(body.count(mark, at, min(at + _AT_ONCE, end)) for at in range(start, end, _AT_ONCE))


def _between_strings(body: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Where the text outside of strings begins and ends, each with the string that follows (a long one as nothing)."""
    start = 0
    while True:
        opening = body.find(b'"', start)
        if opening < 0:
            yield start, len(body), b""
            return
        closing = body.find(b'"', opening + 1)
        while closing > 0 and _is_escaped(body, closing):
            closing = body.find(b'"', closing + 1)
        if closing < 0:  # no JSON; the decoder says where
            yield start, len(body), b""
            return
        yield start, opening, body[opening : closing + 1] if closing - opening < 256 else b""
        start = closing + 1


def _is_escaped(body: bytes, quote: int) -> bool:
    before = quote - 1
    while body[before] == 0x5C:
        before -= 1
    return (quote - before) % 2 == 0


def _field_name(string: bytes) -> str | None:
    try:
        name: str = msgspec.json.decode(string, type=str)
    except msgspec.MsgspecError:
        return None
    return name


def _find_list(body: bytes, start: int, end: int) -> tuple[int, int] | None:
    """The bounds of the array that is the whole value of the field before `start`."""
    first, last = body.find(b"[", start, end), body.rfind(b"]", start, end) + 1
    if first < 0 or last <= first or body[start:first].strip() != b":" or body[last:end].strip() not in (b",", b"}"):
        return None
    return first, last


def _decode(body: bytes, first: int, last: int) -> NumberList | None:
    """The array in these bounds; None when it is anything but whole numbers, or lists of them."""
    if _count(body, b",", first, last) >= MAX_NUMBERS or _count(body, b"[", first, last) > MAX_LISTS + 1:
        raise invalid(
            f"A list of token ids may hold {MAX_NUMBERS} of them at most, in {MAX_LISTS} lists.",
            code="body_too_complex",
        )
    inner = body.find(b"[", first + 1, last)
    try:
        return _numbers(body, first, last) if inner < 0 else _lists(body, first, last)
    except msgspec.MsgspecError:
        return None


def _numbers(body: bytes, first: int, last: int) -> list[int]:
    """A flat array, decoded in pieces that end before a comma. Raises `msgspec.MsgspecError`."""
    numbers: list[int] = []
    start, stop = first + 1, last - 1
    while True:
        end = body.find(b",", min(start + _LONG, stop), stop)
        piece = body[start : end if end >= 0 else stop]
        decoded = _decoder.decode(b"[" + piece + b"]")
        if not decoded and (numbers or end >= 0):
            raise msgspec.DecodeError("nothing between two commas")
        numbers += decoded
        if end < 0:
            return numbers
        start = end + 1


def _lists(body: bytes, first: int, last: int) -> list[list[int]]:
    """An array of flat arrays. Raises `msgspec.MsgspecError`."""
    lists: list[list[int]] = []
    start, stop = first + 1, last - 1
    while True:
        opening, closing = body.find(b"[", start, stop), body.find(b"]", start, stop)
        between = body[start : opening if opening >= 0 else stop].strip()
        if opening < 0 and lists and not between:
            return lists
        if not 0 <= opening < closing or between != (b"," if lists else b""):
            raise msgspec.DecodeError("no list of lists")
        lists.append(_numbers(body, opening, closing + 1))
        start = closing + 1
