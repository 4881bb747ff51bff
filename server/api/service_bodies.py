"""The JSON of the small answers."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class StatusBody(Struct, frozen=True):
    """That all is well; anything else is an error."""

    status: str


class VersionBody(Struct, frozen=True):
    """The server's version."""

    version: str


class ModelBody(Struct, frozen=True):
    """A served name."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "outrider"
    parent: None = None


class ModelListBody(Struct, frozen=True):
    """All served names."""

    data: list[ModelBody]
    object: str = "list"


class TokenizeBody(Struct, frozen=True):
    """The tokens of a text or of a rendered conversation."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeBody(Struct, frozen=True):
    """The text of tokens."""

    prompt: str
