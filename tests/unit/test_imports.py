"""Imports point one way: see ARCHITECTURE.md."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "server"

# room -> rooms of this package that it may import from; "." is the files directly under server/
ALLOWED = {
    "api": {"api", "checkpoint", "messages", "config", "errors", "background", "grammar", "logs"},
    "tracing": {"tracing", "api", "errors"},
    "metrics": {"metrics", "messages", "config", "errors"},
    "checkpoint": {"checkpoint", "errors"},
    "bench": {"bench", "errors", "config_faults", "cli_parser", "config_sources", "flags", "engine", "messages"},
    "engine": {"engine", "spec", "checkpoint", "messages", "config", "errors", "setting_values", "grammar", "logs"},
    "grammar": {"grammar", "messages"},
    "spec": {"spec", "engine", "checkpoint", "messages", "config", "errors", "setting_values"},
}


def imported(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            yield node.module or ""


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    for file in (ROOT / room).rglob("*.py"):
        for name in imported(file):
            if name.startswith("server."):
                assert name.split(".")[1] in ALLOWED[room], f"{file.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("room", ["api", "checkpoint", "metrics", "bench", "grammar"])
def test_rooms_of_the_api_process_do_not_import_torch(room: str) -> None:
    for file in (ROOT / room).rglob("*.py"):
        assert not any(name.split(".")[0] in ("torch", "triton", "transformers") for name in imported(file)), file


def test_tracing_costs_nothing_while_it_is_off() -> None:
    """FastAPI itself imports OpenTelemetry's interface where it is installed; what does the work is not loaded."""
    off = ("opentelemetry.sdk", "opentelemetry.exporter", "server.tracing.app", "server.tracing.export")
    code = f"import sys, server.cli, server.launch; sys.exit(any(name.startswith({off}) for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_api_process_does_not_load_torch() -> None:
    code = "import sys, server.cli, server.launch; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
