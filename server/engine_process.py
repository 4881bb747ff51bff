"""The engine process as its parent sees it: start, exit, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Sequence
from pathlib import Path

from server.config import Settings
from server.errors import UserError

ENGINE_COMMAND = (sys.executable, "-m", "server.engine")


class EngineProcess:
    """One started engine, the leader of its own session, so that Ctrl-C in a terminal reaches only its parent.

    Attributes:
        exit: ends with the process; its result is the exit code, negative for a signal.
    """

    def __init__(self, process: Process) -> None:
        self._pid = process.pid
        self.exit: asyncio.Task[int] = asyncio.create_task(process.wait(), name="engine")

    @classmethod
    async def start(cls, command: Sequence[str], settings: Settings, folder: Path) -> EngineProcess:
        """Start `command` with the settings as a file in `folder`, which also holds the link's sockets.

        API keys, and what needs them, are no business of the engine and stay out of the file.

        Raises:
            UserError: the file cannot be written.
        """
        config = folder / "settings.json"
        content = settings.model_dump_json(exclude={"api_key", "max_inflight_per_key"})
        try:
            config.write_text(content, encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{config} cannot be written: {error.strerror}; set TMPDIR to a folder with space"
            ) from None
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--config-file", str(config), "--link", str(folder), "--parent", str(os.getpid())),
            stdin=DEVNULL,
            start_new_session=True,
        )
        return cls(process)

    async def end(self, patience: float) -> None:
        """Wait up to `patience` seconds for an exit that was asked for, then kill what is left of the group."""
        await asyncio.wait([self.exit], timeout=patience)
        self.kill()
        await self.exit

    def kill(self) -> None:
        """Kill the engine and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)


def describe_exit(code: int) -> str:
    """What an exit code says, for people."""
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hint = "; the kernel does so when memory runs out" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}"
