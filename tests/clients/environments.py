"""Where the clients that we did not write are installed, and what happens when one is not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
REQUIRED = os.environ.get("CLIENTS_REQUIRED") == "1"
"""Set by `make test-clients`, which makes every environment: one that is missing there is a fault."""


def interpreter(name: str) -> Path:
    """The Python of the environment that `make` builds from requirements/NAME.txt; skips or fails without it."""
    folder = ROOT / ".venv-clients" / name
    need(folder / ".made")
    return folder / "bin" / "python"


def need(stamp: Path) -> None:
    """Skip, or fail where the clients are required, unless `make client-environments` has left this file."""
    if not stamp.exists():
        reason = f"{stamp.relative_to(ROOT)} is not there: run `make client-environments`"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)


def run(*command: str | Path, seconds: float = 280, **environment: str) -> str:
    """What a client printed; the test fails with all of it when the client does."""
    # Neither proxies nor settings of the machine may decide where a client sends its requests.
    inherited = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    inherited.pop("PYTHONDONTWRITEBYTECODE", None)  # packages are installed without it
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=HERE,
            env={**inherited, "OMP_NUM_THREADS": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"it was not done after {seconds} s: {error.output}") from None
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout[-20000:]}"
    return done.stdout


def run_tests(name: str, file: str, url: str, **environment: str) -> str:
    """Run the tests of inside/FILE with the pytest of the environment NAME against the server at `url`."""
    plain = ("-c", os.devnull, "--rootdir", HERE, "--noconftest", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto")
    return run(interpreter(name), "-m", "pytest", "-q", *plain, HERE / "inside" / file, SERVER_URL=url, **environment)
