"""The embedded model gives the same from a folder in transformers' layout as from its GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_server import LiveServer, Start


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers_folder import write_smollm2

    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    write_smollm2(folder)
    return folder


@pytest.mark.slow
def test_the_folder_and_the_gguf_file_give_the_same(start: Start, folder: Path, smollm2: LiveServer) -> None:
    server = start(str(folder), "--dtype", "float32", "--num-kv-blocks", "256").ready()
    for text in ("The capital of France is", "def add(a, b):\n", "東京は"):
        ids = smollm2.encode(text)
        assert server.encode(text) == ids
        assert server.token_ids(text, max_tokens=24) == smollm2.token_ids(text, max_tokens=24)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    answers = [
        each.post("/v1/chat/completions", messages=messages, max_tokens=12, temperature=0).json()
        for each in (server, smollm2)
    ]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["prompt_tokens"] == answers[1]["usage"]["prompt_tokens"]
