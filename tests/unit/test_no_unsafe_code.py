"""What could execute a stranger's bytes, or ask a stranger's host, is not in the server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2] / "server"
FILES = sorted(ROOT.rglob("*.py"))
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "numpy.load", "np.load", "yaml.load", "os.system"}
OBJECT_SOCKETS = {"send_pyobj", "recv_pyobj"}
HTTP_CLIENTS = {"httpx", "requests", "urllib.request", "aiohttp", "http.client", "urllib3", "huggingface_hub"}
MAY_ASK_OTHERS = {"bench", "checkpoint"}
"""Rooms that a person's command reaches and no request: the load generator, the download of a hub's model."""


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def trees() -> Iterator[tuple[Path, ast.AST]]:
    for file in FILES:
        yield file.relative_to(ROOT), ast.parse(file.read_text(encoding="utf-8"))


def test_nothing_is_unpickled_and_no_text_is_run() -> None:
    for file, tree in trees():
        assert not UNPICKLERS & {name.split(".")[0] for name in imported(tree)}, file
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in CALLS, f"{file}:{node.lineno}"
            if isinstance(node, ast.Attribute):
                assert node.attr not in OBJECT_SOCKETS, f"{file}:{node.lineno}"


def test_no_shell_is_asked() -> None:
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg == "shell":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, file


def test_the_code_that_serves_requests_cannot_ask_other_hosts() -> None:
    for file, tree in trees():
        if file.parts[0] not in MAY_ASK_OTHERS:
            assert not HTTP_CLIENTS & set(imported(tree)), file


def test_templates_are_made_in_the_immutable_sandbox() -> None:
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Environment"):
                assert ast.unparse(node.func).endswith("ImmutableSandboxedEnvironment"), file
