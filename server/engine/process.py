"""What a process of ours owes the system: a name in `ps`, and no life after its parent's."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


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
