"""Servers for the tests here: shared ones, started once a run, and own ones, which a test may break."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from live_server import LiveServer, Start
from tiny_checkpoint import write_tiny_llama

if TYPE_CHECKING:
    from oracle import Oracle


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that starts in seconds."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a server, or take the one that runs with these very arguments."""
    servers: dict[tuple[str, ...], LiveServer] = {}

    def get(*arguments: str) -> LiveServer:
        if arguments not in servers:
            servers[arguments] = LiveServer(tmp_path_factory.mktemp("shared"), *arguments).ready()
        assert servers[arguments].process.poll() is None, f"an earlier test ended it:\n{servers[arguments].log}"
        return servers[arguments]

    yield get
    for server in servers.values():
        server.kill()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a server of one's own."""
    started: list[LiveServer] = []

    def begin(*arguments: str, wrapper: tuple[str, ...] = ()) -> LiveServer:
        started.append(LiveServer(tmp_path / str(len(started)), *arguments, wrapper=wrapper))
        return started[-1]

    yield begin
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def tiny(shared: Start, tiny_folder: Path) -> LiveServer:
    """The tiny model with a cache that many requests fit in."""
    return shared(str(tiny_folder), "--num-kv-blocks", "4096")


@pytest.fixture(scope="session")
def tiny_crowded(shared: Start, tiny_folder: Path) -> LiveServer:
    """The tiny model with small steps and so few blocks that requests drive each other out."""
    return shared(str(tiny_folder), "--num-kv-blocks", "40", "--max-num-batched-tokens", "48", "--max-num-seqs", "32")


@pytest.fixture(scope="session")
def smollm2(shared: Start) -> LiveServer:
    """The embedded model in fp32, with small steps and few blocks."""
    return shared(
        "--dtype", "float32", "--num-kv-blocks", "20", "--max-num-batched-tokens", "128", "--max-num-seqs", "32"
    )


@pytest.fixture(scope="session")
def smollm2_oracle() -> Oracle:
    """transformers on the embedded model's weights; most tests here need neither."""
    from oracle import Oracle, smollm2_model

    return Oracle(smollm2_model())
