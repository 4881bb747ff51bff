"""The log of a live server as JSON: every line of it, from the start to the end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.live_server import LiveServer
from tests.e2e.tiny_checkpoint import write_tiny_llama


def lines(server: LiveServer) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log.splitlines()]


def test_every_line_is_an_object_and_requests_have_their_ids(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    server = LiveServer(tmp_path / "server", str(model), "--num-kv-blocks", "100", "--log-format", "json").ready()
    try:
        for path in ("/health", "/ready", "/metrics"):
            assert server.status(path) == 200
        body = {"prompt": [1, 2], "max_tokens": 3}
        answer = httpx.post(
            server.url + "/v1/completions", json=body, headers={"x-request-id": "mine-1"}, timeout=60, trust_env=False
        )
        assert answer.status_code == 200
        server.process.terminate()
        assert server.exit_code() == 0
    finally:
        server.kill()
    said = lines(server)
    assert all({"time", "level", "logger", "process", "message"} <= line.keys() for line in said)
    (ready,) = [line for line in said if line["message"].startswith("ready at")]
    assert ready["url"] == server.url and ready["served_model_name"] == "model"
    rows = {(line["role"], line["component"]): line["resolved"] for line in said if "resolved" in line}
    assert rows["target", "attention"] == "torch"
    answered = [line for line in said if line["logger"] == "uvicorn.access"]
    assert [(line["path"], line["status"], line["request_id"]) for line in answered] == [
        ("/v1/completions", 200, "mine-1")
    ]


def test_a_start_that_fails_says_so_in_json(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    server = LiveServer(tmp_path / "server", str(tmp_path / "empty"), "--log-format", "json")
    try:
        assert server.exit_code() == 1
    finally:
        server.kill()
    assert lines(server)[-1]["level"] == "error"
    assert "config.json" in lines(server)[-1]["message"]
