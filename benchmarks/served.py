"""A server as a process, for benchmarks that talk to it over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil


def serve_command(*flags: str) -> list[str]:
    """`outrider serve` of this tree, on a free port."""
    return [sys.executable, "-m", "server", "serve", "--port", "0", *flags]


class Served:
    """A started server; it is ready once this exists.

    `command` must print a line with "ready at URL", as `outrider serve` does.
    """

    def __init__(self, command: list[str]) -> None:
        started = time.monotonic()
        self._process = subprocess.Popen(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines: list[str] = []
        self.url = ""
        for line in self._process.stdout:
            lines.append(line)
            if match := re.search(r"ready at (http://[\d.:]+)", line):
                self.url = match[1]
                break
        if not self.url:
            raise SystemExit("".join(lines))
        self.ready = time.monotonic() - started
        """Seconds from the command to readiness."""
        # A pipe that nobody reads is full some day, and the server would wait to write its next line.
        threading.Thread(target=self._process.stdout.read, daemon=True).start()

    @property
    def peak(self) -> int:
        """The most memory that its processes have used, in bytes, summed."""
        own = psutil.Process(self._process.pid)
        return sum(peak_bytes(process.pid) for process in (own, *own.children(recursive=True)))

    def end(self) -> None:
        """Stop it."""
        self._process.terminate()
        self._process.wait()


def peak_bytes(pid: int) -> int:
    """The most memory that one process has used."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
