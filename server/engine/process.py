"""What a process of ours owes the system: a name in `ps`, and no life after its parent's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
SPINS = "5000"
"""About 0.1 to 0.3 ms, longer than the pauses between two products of a step."""


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent is gone, however it went.

    Args:
        parent: the pid that started us; if it is gone already, exit at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def leave_signals_to_parent() -> None:
    """Ctrl-C and SIGTERM are the API process's to answer: it drains, then tells the engine to leave."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def wait_briefly() -> None:
    """Let threads that wait for the next product sleep soon; call it before torch is imported.

    By default they spin for many milliseconds. Where anything else wants the cores, the API process for one, a step
    then waits for a thread that has none. What the environment says of waiting counts.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
