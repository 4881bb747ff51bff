"""As process 1, which it is in a container: signals reach it and it leaves nothing; and with no network at all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.live_server import LiveServer
from tests.e2e.tiny_checkpoint import write_tiny_llama

PROCESS_ONE = ("unshare", "--map-root-user", "--fork", "--pid", "--mount-proc")
NO_NETWORK = ("unshare", "--map-root-user", "--net")
WATCH = """
import os, sys
WHOM = {"socket.connect": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
def watch(event, arguments):
    if event in WHOM:
        with open(os.environ["CALLS"], "a") as file:
            file.write(f"{event} {arguments[WHOM[event]]}\\n")
sys.addaudithook(watch)
"""
"""A sitecustomize module: each process of Python notes whom it looks up or calls."""


def allowed(wrapper: tuple[str, ...]) -> bool:
    """Whether this machine lets us make such namespaces."""
    return shutil.which("unshare") is not None and subprocess.run([*wrapper, "true"], check=False).returncode == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


Start = Callable[..., LiveServer]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[LiveServer] = []

    def begin(*arguments: str, wrapper: tuple[str, ...]) -> LiveServer:
        if not allowed(wrapper):
            pytest.skip(f"needs {' '.join(wrapper)}")
        started.append(LiveServer(tmp_path / str(len(started)), *arguments, wrapper=wrapper))
        return started[-1]

    yield begin
    for server in started:
        for process in family(server):
            process.kill()
        server.process.wait()


def family(server: LiveServer) -> list[psutil.Process]:
    """The server and what it started, without unshare, which waits for it outside."""
    return psutil.Process(server.process.pid).children(recursive=True) if server.process.poll() is None else []


def test_process_1_drains_on_sigterm_and_leaves_no_process(start: Start, model: Path) -> None:
    server = start(str(model), "--num-kv-blocks", "64", wrapper=PROCESS_ONE)
    server.wait_for(lambda: "ready at" in server.log or server.process.poll() is not None)
    processes = family(server)
    assert len(processes) >= 2 and psutil.STATUS_ZOMBIE not in [process.status() for process in processes]
    answer = server.complete("a", max_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2
    processes[0].send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
    assert not any(process.is_running() for process in processes)


def test_process_1_ends_on_a_signal_that_comes_before_anything_is_loaded(start: Start, model: Path) -> None:
    server = start(str(model), wrapper=PROCESS_ONE)
    (api,) = server.wait_for(lambda: family(server))
    server.wait_for(lambda: catches_sigterm(api.pid))
    assert "http://" not in server.log, "too late to show anything"
    api.send_signal(signal.SIGTERM)
    assert server.exit_code() in (0, 128 + signal.SIGTERM)


def catches_sigterm(pid: int) -> bool:
    """Whether the process has a handler; the kernel keeps a signal from process 1 that it has none for."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(mask, 16) & 1 << (signal.SIGTERM - 1))


def test_target_and_draft_from_folders_ask_nobody(
    start: Start, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook, calls = tmp_path / "hook", tmp_path / "calls"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(WATCH)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    draft = shutil.copytree(model, tmp_path / "draft")
    server = start(str(model), "--num-kv-blocks", "64", "--speculative-config.model", str(draft), wrapper=NO_NETWORK)
    server.wait_for(lambda: "ready at" in server.log or server.process.poll() is not None)
    assert "ready at" in server.log and "draft" in server.log
    assert set(calls.read_text().splitlines()) == {"socket.getaddrinfo 127.0.0.1"}, "where it listens"
    server.process.send_signal(signal.SIGTERM)
    assert server.exit_code() == 0
