"""What drafts when nobody says a word about drafts: the head that is packaged for the embedded model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.checkpoint.packaged_heads import EMBEDDED_MODEL_HEAD, packaged_head
from server.config_speculative import Given


def default_draft(settings: Mapping[str, Any]) -> dict[str, Given] | None:
    """The draft's model, for a server of the embedded model with its own weights and tokenizer; else None.

    Args:
        settings: of all sources but the draft's, by name.
    """
    if settings.get("model") is not None or settings.get("tokenizer") is not None:
        return None
    if str(settings.get("load_format", "auto")).lower() == "dummy" or packaged_head(EMBEDDED_MODEL_HEAD) is None:
        return None
    source = "the embedded model's packaged head"
    return {"model": Given(EMBEDDED_MODEL_HEAD, source)} | (
        {"load_format": Given("auto", source)} if settings.get("load_format") is not None else {}
    )
