from __future__ import annotations

import asyncio

import pytest

from server.api.request_stream import RequestStream
from server.messages import RequestOutput, TokenLogprobs


class Releases:
    def __init__(self) -> None:
        self.ended: list[int] = []
        self.aborted: list[list[int]] = []

    def __call__(self, ids: list[int], abort: bool) -> None:
        if abort:
            self.aborted.append(ids)
        else:
            self.ended.extend(ids)


async def collect(stream: RequestStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def test_outputs_of_a_slow_consumer_are_merged_by_sequence() -> None:
    releases = Releases()
    stream = RequestStream([1, 2], releases)
    one, two = (TokenLogprobs(-float(i), 1, [], []) for i in (1, 2))
    stream.put(RequestOutput(1, [10], logprobs=[one], cached_tokens=4, first_scheduled=0.5), 1.0)
    stream.put(RequestOutput(2, [20]), 1.0)
    stream.put(RequestOutput(1, [11], logprobs=[two]), 2.0)
    stream.put(RequestOutput(1, [12], finish_reason="stop", stop_token_id=12), 3.0)
    stream.put(RequestOutput(2, [], finish_reason="length"), 3.0)
    assert await collect(stream) == [
        RequestOutput(
            1,
            [10, 11, 12],
            logprobs=[one, two],
            finish_reason="stop",
            stop_token_id=12,
            cached_tokens=4,
            first_scheduled=0.5,
        ),
        RequestOutput(2, [20], finish_reason="length"),
    ]
    assert stream.received == 3.0
    stream.close()
    assert (releases.ended, releases.aborted) == ([1, 2], [])


async def test_closing_early_aborts_once_and_ends_the_iteration() -> None:
    releases = Releases()
    stream = RequestStream([1, 2, 3], releases)
    stream.put(RequestOutput(2, [], finish_reason="stop"), 0.0)
    waiting = asyncio.create_task(collect(stream))
    await asyncio.sleep(0)
    stream.close()
    stream.close()
    await waiting
    assert releases.aborted == [[1, 3]]
    stream.put(RequestOutput(1, [5]), 0.0)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_aborting_one_sequence_leaves_the_others() -> None:
    releases = Releases()
    stream = RequestStream([1, 2], releases)
    stream.put(RequestOutput(1, [5]), 0.0)
    stream.abort(1)
    stream.put(RequestOutput(1, [6]), 0.0)
    stream.put(RequestOutput(2, [7], finish_reason="length"), 0.0)
    assert await collect(stream) == [RequestOutput(2, [7], finish_reason="length")]
    assert (releases.ended, releases.aborted) == ([2], [[1]])
