"""The load generator counts what a server really sent, and says what went wrong."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from server.bench.command import bench_http
from server.bench.http import RequestResult
from server.bench.report import percentile, summarize
from server.bench.workload import Body, file_prompts, random_prompts, request_body
from server.config_faults import UsageError
from server.errors import UserError

Answer = Callable[[dict[str, Any]], list[bytes]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def stream(tokens: int) -> list[bytes]:
    """Two tokens an event, then usage, with a comment and an empty delta between."""
    events = [event({"choices": [{"index": 0, "text": "ab"}]}) for _ in range(tokens // 2)]
    usage = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
    quiet = event({"choices": [{"index": 0, "text": ""}]})
    return [HEAD, b": keep-alive\n\n", *events, quiet, usage, b"data: [DONE]\n\n"]


class Server:
    """A real HTTP server on a free port, in a thread; answers each POST with the bytes that `answer` gives."""

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.most_open = 0
        self._open = 0
        self._answer = answer

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        self.most_open = max(self.most_open, self._open)
        try:
            await self._reply(reader, writer)
        finally:
            self._open -= 1
            writer.close()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        if head.startswith("get /v1/models "):
            body = b'{"data": [{"id": "served"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        else:
            length = int(head.split("content-length:")[1].split("\r\n")[0])
            request = json.loads(await reader.readexactly(length))
            self.bodies.append(request)
            for piece in self._answer(request):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)

    @contextmanager
    def running(self) -> Iterator[str]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._handle, "127.0.0.1", 0), loop).result()
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:

            async def close() -> None:
                server.close()
                handlers = asyncio.all_tasks() - {asyncio.current_task()}
                for handler in handlers:
                    handler.cancel()
                await asyncio.gather(*handlers, return_exceptions=True)
                await server.wait_closed()

            asyncio.run_coroutine_threadsafe(close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


def run(*argv: str) -> tuple[int, str]:
    out = io.StringIO()
    code = bench_http(argv, Console(file=out, width=200), Console(file=io.StringIO()))
    return code, out.getvalue()


def test_it_counts_tokens_by_usage(tmp_path: Path) -> None:
    server = Server(lambda _: stream(8))
    with server.running() as url:
        path = tmp_path / "report.json"
        code, text = run("--url", url, "--streams", "3", "--requests", "9", "--json", str(path), "--warmup", "2")
    report = json.loads(path.read_text())
    assert code == 0 and len(server.bodies) == 11
    assert server.most_open == 3
    assert (report["requests"], report["failed"], report["output_tokens"], report["prompt_tokens"]) == (9, 0, 72, 27)
    assert report["output_tokens_per_second"] == pytest.approx(72 / report["seconds"])
    # 4 events with 8 tokens: 3 gaps in the time of 7 tokens
    ratio = report["time_per_output_token_ms"]["mean"] / report["inter_token_ms"]["mean"]
    assert ratio == pytest.approx(3 / 7)
    assert {body["model"] for body in server.bodies} == {"served"}
    assert all(
        body["stream_options"] == {"include_usage": True} and len(body["prompt"]) == 46 for body in server.bodies
    )
    assert "output tok/s" in text and "p99" in text


def test_a_rate_sends_without_waiting_for_answers() -> None:
    server = Server(lambda _: stream(20))
    with server.running() as url:
        code, _ = run("--url", url, "--model", "m", "--rate", "2000", "--requests", "10", "--warmup", "0")
    assert code == 0 and server.most_open > 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([b'HTTP/1.1 429 No\r\nconnection: close\r\n\r\n{"error": {"message": "queue full"}}'], "HTTP 429: queue full"),
        ([HEAD, event({"error": {"message": "engine died"}}), b"data: [DONE]\n\n"], "engine died"),
        ([HEAD, event({"choices": [{"text": "a"}]})], "ended without [DONE]"),
        ([HEAD, event({"choices": [{"text": "a"}]}), b"data: [DONE]\n\n"], "no usage"),
        ([HEAD, b"data: {oops\n\n"], "DecodeError"),
    ],
)
def test_failures_are_told(answer: list[bytes], message: str) -> None:
    with Server(lambda _: answer).running() as url:
        code, text = run("--url", url, "--model", "m", "--requests", "2", "--warmup", "0")
        assert code == 1 and "2 failed" in text and message in text
        with pytest.raises(UserError, match="v1/completions"):
            run("--url", url, "--model", "m", "--requests", "2")


def test_chat_sends_messages() -> None:
    server = Server(lambda _: stream(4))
    with server.running() as url:
        run("--url", url + "/v1", "--endpoint", "chat", "--requests", "1", "--prompt-tokens", "5", "--ignore-eos")
    message = server.bodies[0]["messages"][0]
    assert message["role"] == "user" and len(message["content"].split()) == 5
    assert server.bodies[0]["ignore_eos"] is True


def test_no_server_is_explained() -> None:
    with pytest.raises(UserError, match="no server answers at http://127.0.0.1:9"):
        run("--url", "http://127.0.0.1:9")


@pytest.mark.parametrize("flags", [["--streams", "0"], ["--rate", "-1"], ["--rate", "nan"], ["--stream", "3"], ["x"]])
def test_wrong_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(UsageError):
        run(*flags)


def test_prompts_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text('plain text\n"json text"\n[1, 2]\n\n{"prompt": "p"}\n{"messages": [{"role": "user"}]}\n42\n')
    expected = ["plain text", "json text", [1, 2], "p", [{"role": "user"}], "42"]
    assert file_prompts(path, 8) == [*expected, *expected[:2]]
    path.write_text('ok\n["a", 1]\n')
    with pytest.raises(UserError, match="line 2"):
        file_prompts(path, 1)
    path.write_text("\n")
    with pytest.raises(UserError, match="no prompt"):
        file_prompts(path, 1)


def test_prompts_that_do_not_fit_the_endpoint_are_refused() -> None:
    completions, chat = Body("completions", "m", 1, 0.0, False), Body("chat", "m", 1, 0.0, False)
    with pytest.raises(UserError, match="--endpoint chat"):
        request_body(completions, [{"role": "user", "content": "x"}])
    with pytest.raises(UserError, match="--endpoint completions"):
        request_body(chat, [1, 2])


@given(st.integers(1, 5), st.integers(1, 20), st.integers(2, 300), st.integers())
def test_random_prompts_are_the_same_for_a_seed(count: int, tokens: int, vocab: int, seed: int) -> None:
    prompts = random_prompts(count, tokens, "ids", vocab, seed)
    assert prompts == random_prompts(count, tokens, "ids", vocab, seed)
    assert [len(prompt) for prompt in prompts] == [tokens] * count
    assert all(0 <= token < vocab for prompt in prompts for token in prompt)  # type: ignore[operator]


@given(st.lists(st.floats(0, 1e3), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_between_its_neighbours(values: list[float], share: float) -> None:
    values.sort()
    found = percentile(values, share)
    rank = share * (len(values) - 1)
    assert values[int(rank)] - 1e-9 <= found <= values[min(int(rank) + 1, len(values) - 1)] + 1e-9


def test_a_report_without_success_has_no_latencies() -> None:
    report = summarize([RequestResult(0.0, 2.0, None, (), 0.0, 0, 0, error="broken")])
    assert report.time_to_first_token_ms is None and report.errors == {"broken": 1} and report.failed == 1
