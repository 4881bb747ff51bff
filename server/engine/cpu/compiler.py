"""Compiles the C files for this machine, once: the result is kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
UNITS = ("product.c", "stack.c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
COMPILERS = ("cc", "gcc", "clang")
SECONDS = 300
NEEDED = ("avx2", "fma", "f16c")


class NoKernels(Exception):
    """Why this machine has none; the text goes to the user as it is."""


def compiled_library(cache: Path | None = None) -> Path:
    """The shared library, compiled now if it is not there yet.

    Args:
        cache: the folder to keep it in; the user's cache folder unless given.

    Raises:
        NoKernels: another kind of CPU, no compiler, or one that fails.
    """
    cpu = _cpu_flags()
    missing = [flag for flag in NEEDED if flag not in cpu]
    if platform.machine() not in ("x86_64", "AMD64") or missing:
        raise NoKernels(f"the CPU ({platform.machine()}) lacks {', '.join(missing) or 'x86-64'}")
    folder = cache or _cache_folder()
    target = folder / f"outrider-cpu-{_digest(cpu)}.so"
    if target.exists():
        return target
    named = os.environ.get("CC")
    compiler = next(filter(None, map(shutil.which, (named,) if named else COMPILERS)), None)
    if compiler is None:
        raise NoKernels("no C compiler was found (install gcc)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _compile(compiler, target)
    except OSError as error:
        raise NoKernels(f"{folder} cannot be written ({error.strerror}); XDG_CACHE_HOME names another place") from None
    return target


def _compile(compiler: str, target: Path) -> None:
    # Beside the target, then renamed: whoever starts at the same time finds a whole file or none.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, *(str(SOURCE / unit) for unit in UNITS), "-o", str(made), "-lm"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            raise NoKernels(f"{compiler} took more than {SECONDS} s") from None
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
            raise NoKernels(f"{compiler} failed: {lines[0]}")
        made.replace(target)


def _digest(cpu: frozenset[str]) -> str:
    """Of all that decides what is compiled."""
    known = hashlib.sha256(" ".join([*FLAGS, *sorted(cpu)]).encode())
    for path in sorted(SOURCE.iterdir()):
        known.update(path.read_bytes())
    return known.hexdigest()[:16]


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "outrider"


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()
