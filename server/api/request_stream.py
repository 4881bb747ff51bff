"""What the engine sends for one client request, merged when the consumer is slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from msgspec.structs import replace

from server.api.draft_places import draft_places
from server.api.draft_tally import DraftTally
from server.messages import RequestOutput


class RequestStream:
    """Async iterator over the outputs of the sequences of one client request, in the order of their arrival.

    It ends when each of them has ended. Outputs of one sequence that wait for the consumer are merged into one, so a
    slow consumer holds at most one output per sequence.
    """

    def __init__(self, request_ids: Iterable[int], release: Callable[[list[int], bool], None]) -> None:
        """`release(ids, abort)` is called once per sequence: when it has ended, or to abort it."""
        self._open = set(request_ids)
        self._release = release
        self._pending: dict[int, RequestOutput] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self.received = time.monotonic()
        """When the newest output came in."""
        self.drafts = DraftTally()
        """Of all sequences; outputs are counted here, before steps are merged."""

    @property
    def closed(self) -> bool:
        """Whether `close` was called; the iteration ends then."""
        return self._closed

    def put(self, output: RequestOutput, now: float) -> None:
        """Take over an output (and its lists)."""
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
            self._release([output.request_id], False)
        self.drafts.add(output)
        earlier = self._pending.get(output.request_id)
        self._pending[output.request_id] = output if earlier is None else _merge(earlier, output)
        self.received = now
        self._wake()

    def abort(self, request_id: int) -> None:
        """End one sequence early; nothing more comes for it."""
        self._pending.pop(request_id, None)
        if request_id in self._open:
            self._open.discard(request_id)
            self._release([request_id], True)
        self._wake()

    def close(self) -> None:
        """Abort what is still open and end the iteration. May be called at any time and more than once."""
        if self._closed:
            return
        self._closed = True
        self._pending.clear()
        if self._open:
            remaining = sorted(self._open)
            self._open.clear()
            self._release(remaining, True)
        self._wake()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._closed or not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pending.pop(next(iter(self._pending)))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """One output that says what both say; extends the lists of `earlier` in place."""
    places = [*draft_places(earlier), *draft_places(later)] if earlier.accepted or later.accepted else None
    earlier.token_ids.extend(later.token_ids)
    logprobs = earlier.logprobs
    if logprobs is None:
        logprobs = later.logprobs
    elif later.logprobs is not None:
        logprobs.extend(later.logprobs)
    return replace(
        earlier,
        logprobs=logprobs,
        prompt_logprobs=earlier.prompt_logprobs if earlier.prompt_logprobs is not None else later.prompt_logprobs,
        finish_reason=later.finish_reason,
        stop_token_id=later.stop_token_id,
        error=later.error,
        request_at_fault=later.request_at_fault,
        cached_tokens=earlier.cached_tokens or later.cached_tokens,
        first_scheduled=earlier.first_scheduled or later.first_scheduled,
        drafted=earlier.drafted + later.drafted,
        accepted=earlier.accepted + later.accepted,
        draft_places=places,
    )
