"""Two servers are replaced one after the other under load, and no client notices who tries again after a refusal."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.tiny_checkpoint import write_tiny_llama
from tests.ops.chaos_clients import ChaosClients

PATIENCE = 60


class Instance:
    """A server with the scripted engine, started again on the same port."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder, self._model = folder, model
        self._port = "0"
        self.starts = 0
        self.start()

    def start(self) -> None:
        self.starts += 1
        log = self._folder / f"log-{self.starts}"
        program = str(Path(__file__).with_name("scripted_server.py"))
        engine = ("--pids", str(self._folder / f"pids-{self.starts}"), "--step-seconds", "0.01", "--")
        with log.open("wb") as to:
            self.process = subprocess.Popen(
                [sys.executable, program, *engine, str(self._model), "--port", self._port],
                stderr=to,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            said = log.read_text()
            if self._port == "0" and " on http://127.0.0.1:" in said:
                self._port = said.split(" on http://127.0.0.1:")[1].split()[0]
            if self._port != "0" and self.is_ready():
                return
            time.sleep(0.02)
        raise AssertionError(f"not ready in time: {log.read_text()}")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def is_ready(self) -> bool:
        try:
            return httpx.get(self.url + "/ready", timeout=10, trust_env=False).status_code == 200
        except httpx.TransportError:
            return False

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE)


@pytest.fixture
def instances(tmp_path: Path) -> Iterator[list[Instance]]:
    model = write_tiny_llama(tmp_path / "model")
    started: list[Instance] = []
    try:
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            started.append(Instance(tmp_path / name, model))
        yield started
    finally:
        for instance in started:
            if instance.process.poll() is None:
                instance.end()


def test_no_request_fails(instances: list[Instance]) -> None:
    clients = ChaosClients(*(instance.url for instance in instances), retries=True)
    for instance in instances:
        time.sleep(1)
        before = clients.ledger.whole
        assert instance.end() == 0
        instance.start()
        assert clients.ledger.whole > before, "nothing was answered while it was away"
    time.sleep(1)
    ledger = clients.stop()
    assert (ledger.told, ledger.cut, ledger.left) == ({}, [], 0)
    assert ledger.whole > 50
    # It was put to the test: clients did meet a server that leaves or is away.
    assert sum(ledger.retries.values()) > 0
    assert set(ledger.retries) <= {"503 draining", "503 loading", "ConnectError", "RemoteProtocolError", "ReadError"}
