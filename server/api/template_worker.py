"""The process that renders chat templates: `python -m server.api.template_worker CPU_SECONDS MEMORY_BYTES`.

A template is a program that came with a checkpoint. It may loop for ever, or ask for more memory than there is, and a
thread of Python cannot be stopped; a process can. One JSON object a line goes in, one comes out.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Any

import msgspec
from setproctitle import setproctitle

from server.api.template_language import RefusedByTemplateError, compiled


class RenderRequest(msgspec.Struct, frozen=True):
    """One template with what it is to render."""

    source: str
    variables: dict[str, Any] | None
    """None: only see whether the template is one."""


class RenderReply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of it: one of these; none when there was nothing to render."""

    text: str | None = None
    refusal: str | None = None
    """The template's own words."""
    failure: str | None = None
    """What went wrong in it, for the log."""


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Answer until the other side closes the pipe. A template that uses up its time ends the process."""
    setproctitle("outrider: templates")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Nothing is opened here any more, and the answers leave through a stream that no template can reach.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    decoder = msgspec.json.Decoder(RenderRequest)
    for line in sys.stdin.buffer:
        # The default action of this signal ends the process, in the middle of whatever it does.
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        reply = _encoded(_reply(decoder, line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(reply + b"\n")
        answers.flush()


def _reply(decoder: msgspec.json.Decoder[RenderRequest], line: bytes) -> RenderReply:
    try:
        request = decoder.decode(line)
        template = compiled(request.source)
        return RenderReply(text=None if request.variables is None else template.render(request.variables))
    except RefusedByTemplateError as error:
        return RenderReply(refusal=str(error.message))
    except Exception as error:  # a template can fail in any way that a program can
        return RenderReply(failure=f"{type(error).__name__}: {str(error)[:1000]}")


def _encoded(reply: RenderReply) -> bytes:
    try:
        return msgspec.json.encode(reply)
    except (UnicodeEncodeError, MemoryError) as error:  # a text that is no Unicode, or is too long
        return msgspec.json.encode(RenderReply(failure=type(error).__name__))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
