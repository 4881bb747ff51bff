"""`outrider demo moe`, served with int4 experts, its bf16 MTP layer under a backend of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from live_server import LiveServer

pytestmark = pytest.mark.slow

DRAFT = '{"method": "mtp", "moe_backend": "grouped_mm", "num_speculative_tokens": 3}'


def test_int4_experts_and_a_bf16_draft_each_with_its_backend(tmp_path: Path) -> None:
    folder = tmp_path / "moe"
    command = [sys.executable, "-m", "server", "demo", "moe", "--out", str(folder), "--experts", "int4"]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert "outrider serve" in said.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert again.returncode == 1
    assert "is not an empty folder" in again.stderr
    flags = ("--moe-backend", "torch_int4", "--num-kv-blocks", "40", "--speculative-config", DRAFT)
    server = LiveServer(tmp_path, str(folder), *flags)
    try:
        server.wait_for(lambda: server.status("/ready") == 200, 240)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = server.post("/v1/chat/completions", messages=question, max_tokens=32, temperature=0).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        for role, backend in (("target", "torch_int4"), ("draft", "grouped_mm")):
            assert server.metric("outrider_backend_info", role=role, component="moe", resolved=backend) == 1
        assert server.metric("outrider_spec_decode_draft_tokens_total") > 0
    finally:
        server.kill()
        (folder / "model.safetensors").unlink()
