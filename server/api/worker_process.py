"""Work that may have to be stopped, in processes of its own: a thread cannot be stopped, a process can."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import weakref

_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "HOME")
"""All that a worker gets to see: no key and no token."""


class WorkerPool:
    """Processes of one module, started as they are needed: as many as there are threads that ask at the same time.

    A worker takes one line and answers with one, until its input is closed; what uses up its time or memory ends it.
    """

    def __init__(self, module: str, *, cpu_seconds: float, memory_bytes: int) -> None:
        """Prepare; nothing is started yet.

        Args:
            module: run as `python -m module cpu_seconds memory_bytes`; it holds itself to these limits.
            cpu_seconds: processor time of one answer.
            memory_bytes: address space of a process.
        """
        self._command = (sys.executable, "-m", module, str(cpu_seconds), str(memory_bytes))
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._close = weakref.finalize(self, _close_all, self._idle)

    def ask(self, line: bytes) -> bytes | None:
        """The answer to a line (without its end); None when the worker was stopped over it. Blocks."""
        try:
            worker = self._idle.get_nowait()
        except queue.Empty:
            worker = _Worker(self._command)
        answer = worker.ask(line)
        if answer is None:
            worker.end()
        else:
            self._idle.put(worker)
        return answer

    def close(self) -> None:
        """End the processes."""
        self._close()


class _Worker:
    """One process. It ends by itself when this end of its pipe is closed, whatever happens to the parent."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            start_new_session=True,  # Ctrl-C in a terminal is the parent's business
        )

    def ask(self, line: bytes) -> bytes | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        answer = self._process.stdout.readline()
        return answer[:-1] if answer.endswith(b"\n") else None

    def end(self) -> None:
        with self._process:  # leaving it closes the pipes, which tells the process to go, and waits
            pass


def _close_all(idle: queue.SimpleQueue[_Worker]) -> None:
    while not idle.empty():
        idle.get().end()
