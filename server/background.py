"""Blocking work beside an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run blocking work in a daemon thread: unlike a pool's, it cannot hold up the exit (a download may take hours)."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def settle(act: Callable[[], None]) -> None:
        def unless_over() -> None:
            if not outcome.done():
                act()

        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(unless_over)

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # handed to the one who awaits
            failure = error
            settle(lambda: outcome.set_exception(failure))
        else:
            settle(lambda: outcome.set_result(result))

    threading.Thread(target=run, daemon=True).start()
    return await outcome
