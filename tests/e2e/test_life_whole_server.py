"""Death, freeze, drain and port of the real server with the real engine (cases e1, e10, f1, f2, f4)."""

from __future__ import annotations

import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from live_server import LiveServer, Start, is_alive
from streaming_clients import Stream

ENDLESS = 60_000


@pytest.fixture
def begin(start: Start, tiny_folder: Path) -> Start:
    """Start the tiny model with flags of one's own."""

    def begin(*flags: str) -> LiveServer:
        return start(str(tiny_folder), "--num-kv-blocks", "16384", *flags)

    return begin


def test_a_killed_engine_ends_four_streams_and_the_server(begin: Start) -> None:
    server = begin().ready()
    engine = server.engine
    streams = [Stream(server, ENDLESS) for _ in range(4)]
    engine.send_signal(signal.SIGKILL)
    killed = time.monotonic()
    seen = set()
    while server.process.poll() is None:
        seen.add(server.status("/health"))
        assert time.monotonic() - killed < 20
    assert 503 in seen
    for stream in streams:
        assert stream.error["code"] == "engine_dead"
        # A second is what is promised; a test machine with other work gets more.
        assert stream.ended_at - killed < 5
    assert server.exit_code() == 1
    assert "killed by SIGKILL" in server.log
    assert not is_alive(engine)


def test_a_killed_api_process_takes_its_engine_along(begin: Start) -> None:
    server = begin().ready()
    engine, everyone = server.engine, psutil.Process(server.api_pid).children(recursive=True)
    Stream(server, ENDLESS)
    server.process.kill()
    server.wait_for(lambda: not any(is_alive(process) for process in (engine, *everyone)), seconds=10)


def test_a_frozen_engine_shows_in_health_and_a_drain_lets_streams_finish(begin: Start) -> None:
    server = begin("--engine-timeout", "2").ready()
    assert server.status("/health") == 200
    server.engine.suspend()
    server.wait_for(lambda: server.status("/health") == 503)
    assert server.post("/v1/completions", prompt="a").status_code == 503
    server.engine.resume()
    server.wait_for(lambda: server.status("/health") == 200)
    assert server.complete("a", max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3

    engine = server.engine
    stream = Stream(server, 600)
    server.process.send_signal(signal.SIGTERM)
    server.wait_for(lambda: server.status("/ready") == 503)
    refusal = server.post("/v1/completions", prompt="a", max_tokens=1)
    assert refusal.status_code == 503
    assert refusal.json()["error"]["code"] == "draining"
    assert server.status("/health") == 200
    assert stream.finish_reason == "length"
    assert server.exit_code() == 0
    assert not is_alive(engine)


def test_a_drain_ends_when_its_time_is_over_and_the_port_is_free_again(begin: Start) -> None:
    server = begin("--drain-timeout", "1").ready()
    port = server.url.rsplit(":", 1)[1]
    conflict = begin("--port", port)
    assert conflict.exit_code() == 1
    assert f"port {port}" in conflict.log and "loading" not in conflict.log
    assert server.status("/ready") == 200

    engine, stream = server.engine, Stream(server, ENDLESS)
    server.process.send_signal(signal.SIGTERM)
    assert "shutting down" in stream.error["message"]
    assert server.exit_code() == 0
    assert not is_alive(engine)
    with socket.create_server(("127.0.0.1", int(port))):
        pass


def test_ready_means_that_the_next_request_succeeds(begin: Start) -> None:
    server = begin()
    before = set()
    while server.status("/ready") != 200:
        before.add(server.status("/health"))
        refusal = server.post("/v1/completions", prompt="a", max_tokens=1)
        if refusal.status_code != 200:
            assert refusal.status_code == 503
            assert refusal.json()["error"]["code"] == "loading"
        assert server.process.poll() is None, server.log
    assert before == {200}
    assert server.complete("a", max_tokens=1, ignore_eos=True)["usage"]["completion_tokens"] == 1
    children = psutil.Process(server.api_pid).children()
    assert server.engine in children
    # Templates are rendered, and grammars compiled, in processes of their own.
    assert {child.name() for child in children if child != server.engine} <= {
        "outrider: templates",
        "outrider: grammars",
    }
