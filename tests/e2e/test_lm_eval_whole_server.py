"""lm_eval scores the same through the server as with its own `hf` backend on the same weights (case a3).

lm_eval brings gigabytes, so it may live in an environment of its own: LM_EVAL_PYTHON names its interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import LiveServer, Start

PYTHON = os.environ.get("LM_EVAL_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers_folder import write_smollm2

    folder = tmp_path_factory.mktemp("models") / "SmolLM2-135M-Instruct"
    write_smollm2(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_lm_eval_picks_and_scores_alike(start: Start, folder: Path) -> None:
    if subprocess.run([PYTHON, "-c", "import lm_eval"], capture_output=True, check=False).returncode:
        pytest.skip(f"{PYTHON} has no lm_eval")
    served_name = ("--served-model-name", "SmolLM2-135M-Instruct")
    server = start(str(folder), *served_name, "--dtype", "float32", "--num-kv-blocks", "256").ready()
    program = Path(__file__).with_name("lm_eval_compare.py")
    done = subprocess.run([PYTHON, program, folder, server.url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert report["items"] == report["same picks"] == 10
    assert report["largest difference"] < 1e-3


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
