"""An event is one line for every client, also for those that cut lines where Unicode does."""

from __future__ import annotations

import json

import msgspec

from server.api.streaming import EventEncoder, error_event


class Piece(msgspec.Struct):
    """A text."""

    text: str


def test_no_character_of_a_text_ends_the_line() -> None:
    text = "".join(map(chr, range(0x100))) + "\u2028 \u2029 漢字 🙂"
    events = (EventEncoder()(Piece(text)), error_event(msgspec.json.encode(Piece(text))))
    for event in events:
        line, *rest = event.decode().splitlines()
        assert rest == [""]
        assert json.loads(line.removeprefix("data: ")) == {"text": text}
