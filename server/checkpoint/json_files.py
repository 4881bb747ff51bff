"""JSON files of a checkpoint, read with a size limit and errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from server.errors import UserError

MIB = 1 << 20


def parse_json_object(text: bytes, what: str) -> dict[str, Any]:
    """Parse one JSON object; `what` names the text in the error.

    Raises:
        UserError: not UTF-8, not JSON, nested too deeply, or not an object.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{what} must hold a JSON object, but holds a {type(value).__name__}")
    return value


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a whole file of at most `limit` bytes.

    Raises:
        UserError: the file cannot be read or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if len(data) > limit:
        raise UserError(f"{path} is larger than {limit // MIB} MiB, the most that is read of such a file")
    return data


def read_text(path: Path, limit: int = 4 * MIB) -> str:
    """Read a UTF-8 text file of at most `limit` bytes.

    Raises:
        UserError: the file cannot be read, is larger or is not UTF-8.
    """
    try:
        return read_bytes(path, limit).decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def read_json_object(path: Path, limit: int = 4 * MIB) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        UserError: the file cannot be read, is larger than `limit` bytes, or holds anything else.
    """
    return parse_json_object(read_bytes(path, limit), str(path))


def read_optional_json_object(path: Path, limit: int = 4 * MIB) -> dict[str, Any]:
    """Like `read_json_object`; a file that does not exist gives {}."""
    return read_json_object(path, limit) if path.exists() else {}
