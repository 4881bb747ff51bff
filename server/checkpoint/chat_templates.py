"""Chat templates of a folder: Jinja source by name, never rendered here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server.checkpoint.json_files import read_optional_json_object, read_text
from server.errors import UserError


def read_chat_templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the folder's templates by name; "default" is the one without a name.

    Weakest to strongest: `chat_template.json` (legacy), `tokenizer_config.json`, `chat_template.jinja` with
    `additional_chat_templates/NAME.jinja`.

    Raises:
        UserError: a template file that is unreadable, or an entry of another shape.
    """
    legacy = read_optional_json_object(folder / "chat_template.json")
    templates = _named(legacy.get("chat_template"), folder / "chat_template.json")
    templates |= _named(tokenizer_config.get("chat_template"), folder / "tokenizer_config.json")
    if (folder / "chat_template.jinja").exists():
        templates["default"] = read_text(folder / "chat_template.jinja")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_text(file)
    return templates


def _named(value: Any, file: Path) -> dict[str, str]:
    match value:
        case None:
            return {}
        case str(template):
            return {"default": template}
        case [*entries]:
            templates = {}
            for entry in entries:
                match entry:
                    case {"name": str(name), "template": str(template)}:
                        templates[name] = template
                    case _:
                        raise UserError(f"{file}: an entry of chat_template has no name and template")
            return templates
    raise UserError(f"{file}: chat_template must be a text or a list, not {type(value).__name__}")
