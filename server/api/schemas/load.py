"""From the bytes of a body to all the fields of a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel

from server.api.body import parse_object
from server.api.errors import invalid
from server.api.schemas.sampling import DeliveryFields, SamplingFields
from server.api.schemas.unsupported import refuse_unsupported
from server.api.schemas.validation import ignored_fields, validate, without_nulls

Own = TypeVar("Own", bound=BaseModel)


@dataclass(frozen=True)
class GenerateRequest(Generic[Own]):
    """A checked request: the fields of its endpoint and those that both endpoints have."""

    own: Own
    sampling: SamplingFields
    delivery: DeliveryFields
    ignored: list[str]
    """Unknown fields, for the answer's header."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return _headers(self.ignored)


def generate_loader(own: type[Own]) -> Callable[[bytes], GenerateRequest[Own]]:
    """A function that parses and checks a body; it raises `ApiError` 400 for the first field that is wrong."""
    models: tuple[type[BaseModel], ...] = (own, SamplingFields, DeliveryFields)
    known = frozenset(name for model in models for name in model.model_fields)

    def load(body: bytes) -> GenerateRequest[Own]:
        raw = without_nulls(parse_object(body))
        refuse_unsupported(raw, known)
        request = GenerateRequest(
            own=validate(own, raw),
            sampling=validate(SamplingFields, raw),
            delivery=validate(DeliveryFields, raw),
            ignored=ignored_fields(raw, models),
        )
        if request.delivery.stream_options is not None and not request.delivery.stream:
            raise invalid("stream_options: only a stream has options; set stream to true.", param="stream_options")
        return request

    return load


@dataclass(frozen=True)
class SimpleRequest(Generic[Own]):
    """A checked request of a small endpoint."""

    fields: Own
    ignored: list[str]
    """Unknown fields, for the answer's header."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return _headers(self.ignored)


def simple_loader(model: type[Own]) -> Callable[[bytes], SimpleRequest[Own]]:
    """The same for the small endpoints."""

    def load(body: bytes) -> SimpleRequest[Own]:
        raw = without_nulls(parse_object(body))
        return SimpleRequest(validate(model, raw), ignored_fields(raw, (model,)))

    return load


def _headers(ignored: list[str]) -> dict[str, str]:
    return {"x-outrider-ignored-fields": ", ".join(ignored)} if ignored else {}
