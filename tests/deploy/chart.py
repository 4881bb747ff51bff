"""The chart, rendered by helm."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.deploy_tools import CHART, tool

RELEASE, NAMESPACE = "here", "llm"
FULLNAME = f"{RELEASE}-outrider"
VALUE_SETS = sorted(CHART.glob("ci/*-values.yaml"))


@dataclass(frozen=True)
class Rendered:
    """The resources of one release."""

    resources: list[dict[str, Any]]

    def kinds(self) -> list[str]:
        """Of all resources, in order."""
        return [resource["kind"] for resource in self.resources]

    def of(self, kind: str, name: str = FULLNAME) -> dict[str, Any]:
        """The one resource of a kind and name."""
        (found,) = [r for r in self.resources if r["kind"] == kind and r["metadata"]["name"] == name]
        return found

    @property
    def pod(self) -> dict[str, Any]:
        """The spec of the server's pods."""
        spec: dict[str, Any] = self.of("Deployment")["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        """The only one."""
        (container,) = self.pod["containers"]
        return container

    @property
    def config(self) -> dict[str, Any]:
        """What the server reads."""
        text = self.of("ConfigMap")["data"]["config.yaml"]
        config: dict[str, Any] = yaml.safe_load(text)
        return config


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm."""
    return subprocess.run([tool("helm"), *arguments], capture_output=True, text=True, check=False, timeout=120)


def template(*values: Path, sets: tuple[str, ...] = ()) -> Rendered:
    """Render the chart with value files and `--set` arguments."""
    done = _template(values, sets)
    assert done.returncode == 0, done.stderr
    return Rendered([resource for resource in yaml.safe_load_all(done.stdout) if resource])


def refusal(*values: Path, sets: tuple[str, ...] = ()) -> str:
    """What helm says to values that it must refuse."""
    done = _template(values, sets)
    assert done.returncode != 0, f"{values} {sets} were taken"
    return done.stderr


def _template(values: tuple[Path, ...], sets: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    files = [part for path in values for part in ("--values", str(path))]
    return helm(
        "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *files, *(p for s in sets for p in ("--set", s))
    )
