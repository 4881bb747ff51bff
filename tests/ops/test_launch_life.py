"""The life of the server's processes: start, readiness, death, frozen engine, drain, and nothing left behind.

A small program stands in for the engine; everything else is the real server, in its own process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

PATIENCE = 30
"""Seconds after which a wait gives up; a busy machine may need many."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a tokenizer, one token per byte."""
    folder = tmp_path_factory.mktemp("models") / "tiny-model"
    folder.mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Running:
    """A started server and its engine."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._log = folder / "log"
        self._pids = folder / "pids"

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def url(self) -> str:
        return wait_for(lambda: re.search(r"http://[\d.]+:\d+", self.log), self).group()

    @property
    def engine(self) -> tuple[int, int, Path]:
        """Pid of the engine, of its child, and the folder of the link."""
        parts = wait_for(lambda: self._pids.exists() and self._pids.read_text().split(), self)
        return int(parts[0]), int(parts[1]), Path(parts[2])

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=10, trust_env=False).status_code
        except httpx.TransportError:
            return 0

    def wait_until(self, path: str, status: int) -> None:
        wait_for(lambda: self.status(path) == status, self)

    def ready(self) -> Running:
        self.wait_until("/ready", 200)
        return self

    def post(self, **fields: object) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json={"prompt": "a", **fields}, timeout=60, trust_env=False)

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE)

    def assert_nothing_is_left(self) -> None:
        engine, child, link = self.engine
        wait_for(lambda: not alive(engine) and not alive(child), None)
        assert not link.exists()


class Stream(threading.Thread):
    """A client that reads one streamed answer."""

    def __init__(self, server: Running, max_tokens: int) -> None:
        super().__init__()
        self.events: list[str] = []
        self._url, self._max_tokens = server.url, max_tokens
        self.start()
        wait_for(lambda: len(self.events) > 2, server)

    def run(self) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):  # the server is gone in mid-answer
            self._read()

    def _read(self) -> None:
        body = {"prompt": "a", "max_tokens": self._max_tokens, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", self._url + "/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line[6:])

    @property
    def ended_with_error(self) -> bool:
        self.join(PATIENCE)
        return self.events[-1] == "[DONE]" and "error" in json.loads(self.events[-2])

    @property
    def finish_reason(self) -> str | None:
        self.join(PATIENCE)
        reasons = [c["finish_reason"] for e in self.events[:-1] for c in json.loads(e).get("choices", [])]
        return next((reason for reason in reasons if reason), None)


Start = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(*flags: str, engine: tuple[str, ...] = (), port: int = 0) -> Running:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        program = str(Path(__file__).with_name("scripted_server.py"))
        command = [sys.executable, program, "--pids", str(folder / "pids"), *engine, "--"]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen([*command, str(model), "--port", str(port), *flags], stderr=log)
        started.append(process)
        return Running(folder, process)

    yield begin
    for process in started:
        while process.poll() is None:  # the second one ends it at once
            process.terminate()
            time.sleep(0.1)


def wait_for(probe: Callable[[], Any], server: Running | None) -> Any:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        found = probe()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not happen in time; the server said:\n" + (server.log if server else ""))


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_it_is_alive_before_it_is_ready(start: Start) -> None:
    server = start("--api-key", "s3cret", engine=("--load-seconds", "1.5"))
    _, _, link = server.engine
    assert (server.status("/health"), server.status("/ready")) == (200, 503)
    assert "outrider_engine_up{" in httpx.get(server.url + "/metrics", trust_env=False).text
    assert stat.S_IMODE(link.stat().st_mode) == 0o700
    assert "s3cret" not in (link / "settings.json").read_text()
    server.ready()
    shown = wait_for(lambda: "ready at" in server.log and server.log, server)
    assert "loading weights" in shown and "1000 blocks of 16 tokens" in shown and "curl " in shown
    assert "s3cret" not in shown
    answer = httpx.post(
        server.url + "/v1/completions",
        json={"prompt": "a", "max_tokens": 3, "model": "tiny-model"},
        headers={"Authorization": "Bearer s3cret"},
        trust_env=False,
    )
    assert answer.json()["usage"]["completion_tokens"] == 3
    metrics = httpx.get(server.url + "/metrics", trust_env=False).text
    assert 'outrider_engine_up{model_name="tiny-model"} 1.0' in metrics
    assert 'outrider_generation_tokens_total{model_name="tiny-model"} 3.0' in metrics


def test_a_killed_engine_ends_every_stream_and_the_server(start: Start) -> None:
    server = start().ready()
    streams = [Stream(server, 100_000) for _ in range(4)]
    os.kill(server.engine[0], signal.SIGKILL)
    seen = set()
    while server.process.poll() is None:
        seen.add(server.status("/health"))
    assert 503 in seen
    assert all(stream.ended_with_error for stream in streams)
    assert server.exit_code() == 1
    assert "killed by SIGKILL" in server.log
    server.assert_nothing_is_left()


def test_a_frozen_engine_shows_in_health_until_it_thaws(start: Start) -> None:
    server = start("--engine-timeout", "2").ready()
    os.kill(server.engine[0], signal.SIGSTOP)
    server.wait_until("/health", 503)
    assert 'outrider_engine_up{model_name="tiny-model"} 0.0' in httpx.get(server.url + "/metrics", trust_env=False).text
    os.kill(server.engine[0], signal.SIGCONT)
    server.wait_until("/health", 200)
    assert server.post(max_tokens=2).status_code == 200
    os.kill(server.engine[0], signal.SIGSTOP)  # an engine that cannot listen is killed in the end
    server.process.terminate()
    assert server.exit_code() == 0
    server.assert_nothing_is_left()


def test_sigterm_lets_open_requests_finish(start: Start) -> None:
    server = start(engine=("--step-seconds", "0.05")).ready()
    stream = Stream(server, 25)
    server.process.terminate()
    server.wait_until("/ready", 503)
    assert server.post(max_tokens=1).status_code == 503
    assert stream.finish_reason == "length"
    assert server.exit_code() == 0
    server.assert_nothing_is_left()


def test_ctrl_c_drains_no_longer_than_allowed(start: Start) -> None:
    server = start("--drain-timeout", "0.3").ready()
    stream = Stream(server, 100_000)
    server.process.send_signal(signal.SIGINT)
    assert stream.ended_with_error
    assert server.exit_code() == 0
    server.assert_nothing_is_left()


def test_the_second_signal_ends_it_at_once(start: Start) -> None:
    server = start("--drain-timeout", "3000", engine=("--deaf",)).ready()
    stream = Stream(server, 100_000)
    server.process.terminate()
    server.wait_until("/ready", 503)
    server.process.terminate()
    assert server.exit_code() == 1
    server.assert_nothing_is_left()
    stream.join(PATIENCE)
    assert "[DONE]" not in stream.events


def test_an_engine_does_not_outlive_a_killed_server_and_the_next_one_tidies_up(start: Start) -> None:
    killed, other = start().ready(), start().ready()
    killed.process.kill()
    engine, _, link = killed.engine
    wait_for(lambda: not alive(engine), killed)
    assert link.exists()
    third = start().ready()
    assert not link.exists()
    assert other.engine[2].exists() and third.engine[2].exists()


def test_a_signal_while_loading_is_an_orderly_end(start: Start) -> None:
    server = start(engine=("--load-seconds", "1000"))
    wait_for(lambda: "loading weights" in server.log, server)
    server.process.terminate()
    assert server.exit_code() == 0
    server.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("behaviour", "message"), [("--fail", "the weights are not there: give others"), ("--crash", "exit code 3")]
)
def test_an_engine_that_cannot_start_says_why(behaviour: str, message: str, start: Start) -> None:
    server = start(engine=(behaviour,))
    assert server.exit_code() == 1
    assert message in server.log and "Traceback" not in server.log
    server.assert_nothing_is_left()


def test_a_taken_port_is_told_before_anything_loads_and_can_be_had_again_at_once(start: Start) -> None:
    first = start().ready()
    port = int(first.url.rsplit(":", 1)[1])
    second = subprocess.run(
        [sys.executable, "-m", "server", "serve", "no-such-model", "--port", str(port)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert second.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in second.stderr and "no-such-model" not in second.stderr
    assert first.status("/ready") == 200
    first.process.terminate()
    assert first.exit_code() == 0
    assert start(port=port).ready().url == first.url


def test_a_bound_port_that_does_not_listen_yet_is_no_way_in() -> None:
    from server.errors import UserError
    from server.listener import listen, url_of

    listener = listen("127.0.0.1", 0)
    with listener, pytest.raises(UserError, match="is taken"):
        listen("127.0.0.1", int(url_of(listener).rsplit(":", 1)[1]))
    with pytest.raises(UserError, match="no such address"):
        listen("no.such.host.invalid", 1)
    with pytest.raises(UserError, match="no address of this machine"):
        listen("203.0.113.7", 0)
    if socket.has_ipv6:
        with listen("::1", 0) as six:
            assert url_of(six).startswith("http://[::1]:")
