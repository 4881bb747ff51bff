"""Servers that the clients call; all but one are of a tiny model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import openai
import pytest
from client_servers import KEY, make_client, serve

from tests.e2e.live_server import LiveServer
from tests.e2e.tiny_checkpoint import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that starts in seconds."""
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[LiveServer]:
    """The tiny model, which drafts for itself, with a chat template that takes tools, without an API key."""
    draft = ("--speculative-config.model", str(tiny_folder), "--speculative-config.num_speculative_tokens", "3")
    shape = ("--served-model-name", "tiny", "--num-kv-blocks", "2048")
    template = ("--chat-template", str(Path(__file__).with_name("chat_with_tools.jinja")))
    with serve(tmp_path_factory.mktemp("server"), str(tiny_folder), *shape, *template, *draft) as server:
        yield server


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[LiveServer]:
    """The tiny model behind a key, with room for two sequences, the waiting one included: a third gets 429."""
    limits = ("--max-num-seqs", "1", "--max-queued-requests", "1", "--num-kv-blocks", "2048")
    arguments = (str(tiny_folder), "--served-model-name", "tiny", "--api-key", KEY, *limits)
    with serve(tmp_path_factory.mktemp("server"), *arguments) as server:
        yield server


@pytest.fixture
async def client(tiny: LiveServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """The openai package's own, for the tiny model."""
    async with make_client(tiny) as client:
        yield client
