"""The tools that `make deploy-tools` and `make image-tools` fetch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "outrider"
TOOLS = ROOT / ".tools" / "deploy"


def tool(name: str) -> str:
    """The path of a tool; without it the test is skipped, or fails where DEPLOY_REQUIRED is set (CI)."""
    found = shutil.which(name, path=str(TOOLS / "bin")) or shutil.which(name)
    if found is None:
        reason = f"{name} is not there: `make deploy-tools image-tools` fetches it"
        if os.environ.get("DEPLOY_REQUIRED"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
