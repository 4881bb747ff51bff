"""lm_eval gives the same through the server as with its own `hf` backend on the same weights (case a3)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from client_servers import serve
from environments import HERE, ROOT, interpreter, run


@pytest.mark.timeout(600)
def test_lm_eval_scores_and_generates_alike(tmp_path: Path) -> None:
    python = interpreter("lm-eval")
    folder = tmp_path / "SmolLM2-135M-Instruct"
    run(sys.executable, ROOT / "tests" / "e2e" / "transformers_folder.py", folder)
    arguments = ("--served-model-name", folder.name, "--dtype", "float32", "--num-kv-blocks", "256")
    with serve(tmp_path / "server", str(folder), *arguments) as server:
        told = run(python, HERE / "inside" / "lm_eval_compare.py", folder, server.url, seconds=500)
    report = json.loads(told.strip().splitlines()[-1])
    assert report["items"] == report["same picks"] == 10
    assert report["largest difference"] < 1e-3
    assert report["largest difference with the server's tokenizer"] < 1e-3
    ours, with_our_tokenizer, theirs = report["texts"]
    assert ours == with_our_tokenizer == theirs
    assert all(ours)
    assert report["right"] >= 6
