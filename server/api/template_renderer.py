"""Rendering templates in processes of their own, which a hostile template may end: only its own request fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from server.api.template_worker import RenderReply, RenderRequest
from server.api.worker_process import WorkerPool


class TemplateFailedError(Exception):
    """The template could not be rendered; the message is for the log."""


class TemplateRefusedError(Exception):
    """The template refuses what it is to render; the message is its own."""


class TemplateRenderer:
    """Renders in worker processes. The methods block; call them from threads."""

    def __init__(self, *, cpu_seconds: float = 2.0, memory_bytes: int = 4 * 2**30) -> None:
        """The limits of one rendering: processor time, and address space of the process it happens in."""
        self._pool = WorkerPool("server.api.template_worker", cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
        self._decoder = msgspec.json.Decoder(RenderReply)

    def start(self, source: str) -> None:
        """Have a worker ready that knows the template, so that the first request need not wait for it.

        Raises:
            TemplateFailedError: the template is no Jinja.
        """
        reply = self._ask(RenderRequest(source, None))
        if reply.failure is not None:
            raise TemplateFailedError(reply.failure)

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text that the template makes.

        Raises:
            TemplateRefusedError: the template called `raise_exception`.
            TemplateFailedError: it failed, took too long, or took too much memory.
        """
        reply = self._ask(RenderRequest(source, dict(variables)))
        if reply.refusal is not None:
            raise TemplateRefusedError(reply.refusal)
        if reply.text is None:
            raise TemplateFailedError(reply.failure)
        return reply.text

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _ask(self, request: RenderRequest) -> RenderReply:
        try:
            line = msgspec.json.encode(request)
        except (RecursionError, UnicodeEncodeError) as error:
            raise TemplateFailedError(f"the variables cannot be written down: {error}") from None
        answer = self._pool.ask(line)
        if answer is None:
            raise TemplateFailedError("it was stopped: it takes too long")
        return self._decoder.decode(answer)
