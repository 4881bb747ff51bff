"""The engine's side of the link to the API process."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from server.messages import FromEngine, ToEngine


class Link(Protocol):
    """Messages in and out, whoever is at the other end."""

    def send(self, message: FromEngine) -> None:
        """Send without waiting."""

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        """All messages that are there, after waiting for the first one at most so long."""


class EngineLink:
    """Two one-way local sockets; each frame is one msgpack message of a known type."""

    def __init__(self, link_dir: Path) -> None:
        self._context = zmq.Context()
        self._incoming = self._context.socket(zmq.PULL)
        self._outgoing = self._context.socket(zmq.PUSH)
        for socket in (self._incoming, self._outgoing):
            socket.set(zmq.LINGER, 2000)  # a last word may still leave; a dead reader does not hold us
            socket.set_hwm(0)
        self._incoming.connect(f"ipc://{link_dir}/to-engine")
        self._outgoing.connect(f"ipc://{link_dir}/from-engine")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Send without waiting."""
        self._outgoing.send(self._encoder.encode(message))

    def receive(self, wait_seconds: float) -> list[ToEngine]:
        """All messages that are there, after waiting for the first one at most so long."""
        messages: list[ToEngine] = []
        if self._incoming.poll(int(wait_seconds * 1000)):
            try:
                while True:
                    messages.append(self._decoder.decode(self._incoming.recv(zmq.NOBLOCK)))
            except zmq.Again:
                pass
        return messages

    def close(self) -> None:
        """Flush what was sent and leave."""
        self._incoming.close()
        self._outgoing.close()
        self._context.term()
