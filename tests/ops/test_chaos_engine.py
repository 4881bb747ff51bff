"""Engines stopped and killed, clocks that jump, full disks, clients that leave: nothing is lost unseen."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from server.config import Settings
from server.engine_process import EngineProcess
from server.errors import UserError
from server.link_folder import link_folder
from tests.e2e.live_server import LiveServer, is_alive
from tests.e2e.tiny_checkpoint import write_tiny_llama
from tests.ops.chaos_clients import ChaosClients

NGRAM = ("--speculative-config.method", "ngram")
_FAKETIME = Path(__file__).parents[2] / ".tools" / "faketime"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("chaos") / "tiny")


Start = Callable[..., LiveServer]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    started: list[LiveServer] = []

    def begin(*flags: str, wrapper: tuple[str, ...] = (), blocks: int = 400) -> LiveServer:
        shape = ("--num-kv-blocks", str(blocks), "--max-num-batched-tokens", "64", *NGRAM)
        folder = tmp_path / str(len(started))
        started.append(LiveServer(folder, str(model), *shape, *flags, wrapper=wrapper))
        return started[-1].ready()

    yield begin
    for server in started:
        server.kill()


def family(server: LiveServer) -> list[psutil.Process]:
    return [psutil.Process(server.api_pid), *psutil.Process(server.api_pid).children(recursive=True)]


def assert_all_gone(processes: list[psutil.Process]) -> None:
    psutil.wait_procs(processes, timeout=20)
    assert [process for process in processes if is_alive(process)] == []


def test_stopped_then_killed(start: Start) -> None:
    server = start("--engine-timeout", "2")
    everyone = family(server)
    clients = ChaosClients(server.url)
    time.sleep(1)
    server.engine.send_signal(signal.SIGSTOP)
    server.wait_for(lambda: server.status("/health") == 503)
    server.engine.send_signal(signal.SIGCONT)
    server.wait_for(lambda: server.status("/health") == 200)
    whole = clients.ledger.whole
    server.wait_for(lambda: clients.ledger.whole > whole + 8)
    # While it stood still new requests were refused; those under way went on afterwards.
    assert (clients.ledger.cut, clients.ledger.told.keys() - {"503 engine_dead"}) == ([], set())

    server.engine.send_signal(signal.SIGKILL)
    assert server.exit_code() == 1
    ledger = clients.stop()
    assert ledger.cut == []
    told = {"event engine_dead", "503 engine_dead", "ConnectError", "RemoteProtocolError", "ReadError"}
    assert set(ledger.told) <= told and ledger.told["event engine_dead"] + ledger.told["503 engine_dead"] > 0
    assert_all_gone(everyone)
    assert "Traceback" not in server.log


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.slow)])
def test_a_soak_with_clients_that_leave(seconds: int, start: Start) -> None:
    server = start(blocks=60)  # few enough for preemptions
    everyone = family(server)
    clients = ChaosClients(server.url, clients=16, leaving=0.3)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert server.status("/health") == 200
        time.sleep(0.5)
    ledger = clients.stop()
    server.wait_for(server.is_idle)
    assert (ledger.told, ledger.cut) == ({}, [])
    assert ledger.whole > 20 and ledger.left > 5
    ended = {
        reason: server.metric("outrider_requests_total", finish_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert ended["error"] == 0
    # All that were begun have ended; of those that left, some had their whole answer by then.
    assert sum(ended.values()) >= ledger.sequences
    assert ended["abort"] <= 2 * ledger.left
    assert server.metric("outrider_kv_cache_usage_ratio") == 0
    if seconds > 30:
        assert server.metric("outrider_preemptions_total") > 0
    server.process.terminate()
    assert server.exit_code() == 0
    assert_all_gone(everyone)
    assert "Traceback" not in server.log


def test_clocks_that_jump_change_no_measurement(start: Start, tmp_path: Path) -> None:
    libraries = sorted(_FAKETIME.rglob("libfaketimeMT.so.1"))
    if not libraries:
        pytest.skip("libfaketime is not there: `make .tools/faketime` fetches it (Debian)")
    clock = tmp_path / "clock"
    clock.write_text("+0")
    settings = {
        "LD_PRELOAD": str(libraries[0]),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_RESET": "1",
    }
    server = start("--engine-timeout", "5", wrapper=("env", *(f"{name}={value}" for name, value in settings.items())))
    began = time.monotonic()
    created = []
    for jump in ("+0", "+86400", "-86400", "+0"):
        clock.write_text(jump)
        answer = server.complete([1, 2, 3], max_tokens=30, ignore_eos=True)
        created.append(answer["created"])
        assert answer["usage"]["completion_tokens"] == 30
        assert server.status("/health") == 200
    lasted = time.monotonic() - began
    assert created[1] - created[0] > 80_000 and created[1] - created[2] > 160_000, "the clock did not jump"
    for name in ("request_seconds", "time_to_first_token_seconds", "request_queue_seconds", "request_decode_seconds"):
        assert 0 <= server.metric(f"outrider_{name}_sum") <= lasted
        assert server.metric(f"outrider_{name}_count") == 4
    assert server.metric("outrider_engine_up") == 1
    server.process.terminate()
    assert server.exit_code() == 0


def test_full_disks_for_caches_do_not_matter_to_a_local_model(start: Start, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.mkdir()
    script = f'mount -t tmpfs -o size=16k tmpfs {full} && {{ cat /dev/zero > {full}/x 2>/dev/null; exec "$@"; }}'
    wrapper = ("unshare", "-rm", "sh", "-c", script, "sh")
    if subprocess.run([*wrapper, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system of its own")
    variables = ("HF_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR")
    server = start(wrapper=(*wrapper, "env", *(f"{name}={full}" for name in variables)))
    assert server.complete([1, 2], max_tokens=5, ignore_eos=True)["usage"]["completion_tokens"] == 5
    server.process.terminate()
    assert server.exit_code() == 0


async def test_no_place_for_temporary_files_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(UserError, match="set TMPDIR"), link_folder():
        pass
    with pytest.raises(UserError, match="set TMPDIR"):
        await EngineProcess.start(("true",), Settings(), tmp_path / "missing")


def test_a_client_that_vanishes_while_the_engine_stands_still_is_forgotten(start: Start) -> None:
    server = start()
    server.engine.send_signal(signal.SIGSTOP)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            server.url + "/v1/completions",
            json={"prompt": [1], "max_tokens": 5000, "ignore_eos": True},
            timeout=0.5,
            trust_env=False,
        )
    server.engine.send_signal(signal.SIGCONT)
    server.wait_for(server.is_idle)
    assert server.complete([1], max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2
