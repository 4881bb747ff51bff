"""A real server in its own processes, and what a test wants to know of it from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

PATIENCE = 60
"""Seconds after which a wait gives up; a busy machine may need many."""
ROOT = Path(__file__).parents[2]


class LiveServer:
    """`python -m server serve` with the given arguments, on a free port unless they name one."""

    def __init__(self, folder: Path, *arguments: str, wrapper: tuple[str, ...] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "log"
        port = () if "--port" in arguments else ("--port", "0")
        command = [*wrapper, sys.executable, "-m", "server", "serve", *arguments, *port]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        # Several engines and the tests share the cores: threads that spin for each other would stall all of them.
        environment["OMP_NUM_THREADS"] = "1"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment
            )
        self._engine: psutil.Process | None = None
        self._url: str | None = None

    @property
    def log(self) -> str:
        """All that the server has printed."""
        return self._log.read_text()

    @property
    def url(self) -> str:
        """As told in the log."""
        if self._url is None:
            self._url = self.wait_for(lambda: re.search(r"http://[\d.]+:\d+", self.log)).group()
        return self._url

    @property
    def api_pid(self) -> int:
        """Of the API process."""
        return self.process.pid

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        if self._engine is None:
            api = psutil.Process(self.api_pid)
            self._engine = self.wait_for(lambda: next((child for child in api.children() if is_engine(child)), None))
        return self._engine

    def wait_for(self, probe: Callable[[], Any], seconds: float = PATIENCE) -> Any:
        """Poll until something true comes back."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = probe()
            if found:
                return found
            time.sleep(0.01)
        raise AssertionError(f"it did not happen within {seconds} s; the server said:\n{self.log}")

    def status(self, path: str) -> int:
        """HTTP status of a GET, 0 when nobody answers."""
        try:
            return httpx.get(self.url + path, timeout=10, trust_env=False).status_code
        except httpx.TransportError:
            return 0

    def ready(self) -> LiveServer:
        """Wait for /ready."""

        def probe() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}; it said:\n{self.log}")
            return self.status("/ready") == 200

        self.wait_for(probe)
        _ = self.engine
        return self

    def post(self, path: str, **body: Any) -> httpx.Response:
        """POST a JSON body."""
        return httpx.post(self.url + path, json=body, timeout=PATIENCE * 4, trust_env=False)

    def complete(self, prompt: Any, **body: Any) -> dict[str, Any]:
        """The answer of /v1/completions."""
        response = self.post("/v1/completions", prompt=prompt, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def token_ids(self, prompt: Any, **body: Any) -> list[int]:
        """Greedy unless told otherwise: the token ids of the only choice."""
        answer = self.complete(prompt, **{"temperature": 0, "return_token_ids": True, **body})
        ids: list[int] = answer["choices"][0]["token_ids"]
        return ids

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without what the tokenizer adds."""
        response = self.post("/tokenize", prompt=text, add_special_tokens=False)
        ids: list[int] = response.json()["tokens"]
        return ids

    def client(self) -> httpx.AsyncClient:
        """For many requests at once."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.url, timeout=PATIENCE * 4, limits=limits, trust_env=False)

    def scrape(self) -> str:
        """The text of /metrics."""
        return httpx.get(self.url + "/metrics", timeout=10, trust_env=False).text

    def metric(self, sample: str, **labels: str) -> float:
        """The sum of the samples of this name with these labels."""
        found = [
            value for name, own, value in samples(self.scrape()) if name == sample and labels.items() <= own.items()
        ]
        assert found, f"no sample {sample} {labels}"
        return sum(found)

    def is_idle(self) -> bool:
        """Nothing runs, nothing waits, no block is held."""
        values = {name: value for name, _, value in samples(self.scrape())}
        gauges = ("outrider_requests_running", "outrider_requests_waiting", "outrider_kv_cache_usage_ratio")
        return all(values[name] == 0 for name in gauges)

    def exit_code(self, seconds: float = PATIENCE) -> int:
        """Wait for the end."""
        return self.process.wait(seconds)

    def kill(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.api_pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait()


Start = Callable[..., LiveServer]
"""Starts a server with the arguments given; the fixtures `start` and `shared` are such."""


def is_engine(process: psutil.Process) -> bool:
    """By its command, or the name that it shows in `ps` later."""
    command = " ".join(process.cmdline())
    return "server.engine" in command or "outrider: engine" in command


def is_alive(process: psutil.Process) -> bool:
    """False for zombies, too."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def samples(exposition: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample; the whole text must parse."""
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            yield sample.name, sample.labels, sample.value


async def stream_events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a streamed answer, the final "[DONE]" as a string."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        return [parse_event(line) async for line in response.aiter_lines() if line.startswith("data: ")]


def parse_event(line: str) -> Any:
    """The JSON of a `data:` line; "[DONE]" as it is."""
    content = line.removeprefix("data: ")
    return content if content == "[DONE]" else json.loads(content)


def streamed_text(events: list[Any]) -> str:
    """The text of the first choice of a streamed completion."""
    return "".join(choice["text"] for event in events[:-1] for choice in event["choices"] if choice["index"] == 0)


def finish_reasons(events: list[Any]) -> list[str]:
    """Of all choices, in the order they ended."""
    choices = (choice for event in events if event != "[DONE]" for choice in event.get("choices", []))
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
