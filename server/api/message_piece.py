"""What a piece of the model's text means for the message."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class CallPiece:
    """A piece of one tool call. The first piece of a call has its id and name."""

    index: int
    """Of the call in its message."""
    id: str | None
    name: str | None
    arguments: str


@dataclass(slots=True)
class MessagePiece:
    """What may be sent now. All pieces of a message joined, field by field, are the message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)
