"""What the HTTP side needs of a model: its name, tokenizer, chat template and sampling defaults."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from server.api.context import ServedModel
from server.api.template_renderer import TemplateFailedError, TemplateRenderer
from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.tokenizer import load_tokenizer
from server.config import Settings
from server.errors import UserError

_log = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"


def default_name(model: str | None) -> str:
    """The served name when none is given: a hub id as it is, of a path its last part, which tells nothing private."""
    if model is None:
        return DEFAULT_MODEL_NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def served_model(settings: Settings, checkpoint: Checkpoint) -> ServedModel:
    """Load what the HTTP side needs of a model: tokenizer, chat template, sampling defaults.

    Raises:
        UserError: the tokenizer or the chat template cannot be loaded.
    """
    download_dir = Path(settings.download_dir) if settings.download_dir else None
    files = load_tokenizer(checkpoint, settings.tokenizer, download_dir=download_dir)
    if settings.chat_template is not None:
        try:
            template = Path(settings.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"--chat-template {settings.chat_template}: cannot be read: {reason}") from None
        files = replace(files, chat_templates={"default": template})
    generation_config = checkpoint.generation_config if settings.generation_config == "auto" else {}
    return ServedModel(
        files,
        generation_config,
        tool_call_parser=settings.tool_call_parser,
        reasoning_parser=settings.reasoning_parser,
    )


def check_chat_templates(settings: Settings, model: ServedModel, renderer: TemplateRenderer) -> None:
    """Compile the templates, which also has a process ready that renders them.

    Raises:
        UserError: the one that was named is no Jinja. One of the checkpoint's own is only warned of: completions work.
    """
    for name, source in model.tokenizer.chat_templates.items():
        try:
            renderer.start(source)
        except TemplateFailedError as error:
            if settings.chat_template is not None:
                raise UserError(f"--chat-template {settings.chat_template}: {error}") from None
            _log.warning("the model's chat template %r cannot be used: %s", name, error)
