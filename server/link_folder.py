"""The private folder that holds the sockets between the two processes, and is gone when they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from server.errors import UserError

_PREFIX = "outrider-"
_LOCK = "lock"
_LONGEST_SOCKET_PATH = 107
"""Bytes that Linux takes for the path of a local socket."""


@contextlib.contextmanager
def link_folder() -> Iterator[Path]:
    """A new folder that only this user can enter, removed at the end.

    A server that was killed with SIGKILL cannot remove its own; the next one does.

    Raises:
        UserError: there is no place for it, or its path is too long for sockets.
    """
    try:
        _remove_left_ones()
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    except OSError as error:
        raise UserError(
            f"no folder for temporary files can be written ({error.strerror}); set TMPDIR to one with some space"
        ) from None
    try:
        if len(os.fsencode(folder / "from-engine")) > _LONGEST_SOCKET_PATH:
            raise UserError(
                f"the temporary folder {folder} has too long a path for sockets; set TMPDIR to a shorter one"
            )
        with (folder / "new").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for as long as this process lives, however it ends
            Path(lock.name).rename(folder / _LOCK)  # so a lock file that nobody holds is always a dead server's
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left_ones() -> None:
    for lock in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, in use, or just gone
            if lock.parent.lstat().st_uid == lock.lstat().st_uid == os.getuid():
                with lock.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(lock.parent)
