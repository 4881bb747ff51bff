"""A real Prometheus beside a test: its binaries, a process that scrapes, and questions to it."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.observe_files import RULES

_FOLDER = Path(__file__).parents[2] / ".tools" / "prometheus" / "usr" / "bin"


def binary(name: str) -> str:
    """`prometheus` or `promtool`; skips the test where there is none."""
    found = os.environ.get(name.upper()) or shutil.which(name) or shutil.which(name, path=str(_FOLDER))
    if found is None:
        pytest.skip(f"{name} is not there: `make .tools/prometheus` fetches it (Debian), {name.upper()} may name it")
    return found


def hurried(rules: str) -> str:
    """The rules with a second for every minute: only windows and `for` change, so that a test need not last an hour."""

    def seconds(match: re.Match[str]) -> str:
        number, unit = int(match["number"]), match["unit"]
        return f"{match['before']}{number * {'m': 1, 'h': 60}[unit]}s{match['after']}"

    duration = r"(?P<number>\d+)(?P<unit>[mh])"
    changed, windows = re.subn(rf"(?P<before>\[){duration}(?P<after>\])", seconds, rules)
    changed, delays = re.subn(rf"(?P<before>for: ){duration}(?P<after>\n)", seconds, changed)
    assert windows > 40 and delays > 10
    return changed


class RealPrometheus:
    """Scrapes the targets each second and evaluates the hurried rules."""

    def __init__(self, folder: Path, targets: Mapping[str, str]) -> None:
        """Start it; `targets` are URLs by the name that becomes the label `instance`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rules.yaml").write_text(hurried(RULES.read_text()))
        config = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [
                {
                    "job_name": "outrider",
                    "static_configs": [
                        {"targets": [url.removeprefix("http://")], "labels": {"instance": name}}
                        for name, url in targets.items()
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    binary("prometheus"),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        self._log = folder / "log"
        self.wait_for(lambda: self._get("/-/ready") is not None)

    def _get(self, path: str, **parameters: str) -> httpx.Response | None:
        assert self._process.poll() is None, self._log.read_text()
        try:
            answer = httpx.get(self._url + path, params=parameters, timeout=10, trust_env=False)
        except httpx.TransportError:
            return None
        return answer if answer.status_code == 200 else None

    def wait_for(self, probe: Callable[[], Any], seconds: float = 60) -> Any:
        """Poll until something true comes back; a first scrape may take some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := probe():
                return found
            time.sleep(0.2)
        raise AssertionError(f"it did not happen within {seconds} s; {self.alerts()}\n{self._log.read_text()}")

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each sample now."""
        answer = httpx.get(
            self._url + "/api/v1/query", params={"query": expression}, timeout=10, trust_env=False
        ).json()
        assert answer["status"] == "success", (expression, answer)
        return [(one["metric"], float(one["value"][1])) for one in answer["data"]["result"]]

    def alerts(self) -> set[tuple[str, str]]:
        """Name and instance of what fires."""
        answer = httpx.get(self._url + "/api/v1/alerts", timeout=10, trust_env=False).json()
        return {
            (alert["labels"]["alertname"], alert["labels"].get("instance", ""))
            for alert in answer["data"]["alerts"]
            if alert["state"] == "firing"
        }

    def kill(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
