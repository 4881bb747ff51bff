"""The Dockerfile, as hadolint reads it, and what goes into the build."""

from __future__ import annotations

import subprocess

from tests.deploy.deploy_tools import ROOT, tool


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([tool("hadolint"), str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout


def test_the_build_context_is_a_list_of_what_is_wanted() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*", "what is not named stays out: models, caches, .git, secrets"
    wanted = {line[1:] for line in lines if line.startswith("!")}
    copied = {"pyproject.toml", "README.md", "LICENSE", "server", "deploy/requirements.*.lock", "deploy/wheels"}
    assert wanted == copied
