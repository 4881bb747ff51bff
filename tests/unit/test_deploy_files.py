"""Files of deploy/ that are made from others are in step with them."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = {"cpu": ("otel",), "cuda": ("otel", "gpu", "flashinfer")}
"""What each image is made with, as in the Makefile."""
VARIANTS = pytest.mark.parametrize("variant", EXTRAS)
APART = ("torch", "triton")
"""Installed first and alone: torch comes in builds, and brings the triton that fits it."""


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def lock_of(variant: str) -> str:
    return (ROOT / "deploy" / f"requirements.{variant}.lock").read_text()


def locked(variant: str) -> dict[str, list[str]]:
    """Versions by name; some have one for each Python."""
    versions: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", lock_of(variant), re.MULTILINE):
        versions.setdefault(canonical(name), []).append(version)
    return versions


@VARIANTS
def test_the_lock_satisfies_every_dependency_of_the_image(variant: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for extra in EXTRAS[variant] for line in project["optional-dependencies"][extra]]
    wanted = [Requirement(line) for line in (*project["dependencies"], *extras)]
    versions = locked(variant)
    for requirement in wanted:
        name = canonical(requirement.name)
        if name not in APART:
            assert name in versions, f"{requirement} is not in the {variant} image's lock: run `make lock`"
            assert all(version in requirement.specifier for version in versions[name]), f"{requirement}: `make lock`"


@VARIANTS
def test_the_lock_pins_by_hash_and_names_no_host_and_no_torch(variant: str) -> None:
    text = lock_of(variant)
    assert "://" not in text
    assert text.count("--hash=sha256:") >= len(locked(variant)) > 20
    assert not set(locked(variant)) & set(APART)


def test_the_cpu_image_has_nothing_of_cuda() -> None:
    assert not [name for name in locked("cpu") if name.startswith(("nvidia", "cuda", "flashinfer"))]


def test_the_image_and_the_makefile_name_one_version_of_torch() -> None:
    dockerfile, makefile = (ROOT / "Dockerfile").read_text(), (ROOT / "Makefile").read_text()
    (pinned,) = set(re.findall(r"TORCH_VERSION(?: :)?=([\d.]+)", dockerfile)) or {""}
    assert f"TORCH_VERSION := {pinned}" in makefile and f"TORCH ?= torch=={pinned}" in makefile
    for variant, extras in EXTRAS.items():
        assert f"requirements.{variant}.lock: EXTRAS := {' '.join(extras)}\n" in makefile


def test_the_charts_schema_is_made_from_the_servers_settings() -> None:
    path = ROOT / "deploy" / "helm" / "schema.py"
    spec = importlib.util.spec_from_file_location("chart_schema", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.WRITTEN.read_text() == module.text(), "run `make chart-schema`"


def test_chart_image_and_package_have_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'appVersion: "{version}"' in (ROOT / "deploy" / "helm" / "outrider" / "Chart.yaml").read_text()
    assert f"ARG VERSION={version}\n" in (ROOT / "Dockerfile").read_text()
