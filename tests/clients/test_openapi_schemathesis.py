"""schemathesis: whatever is made from the OpenAPI document gets an answer that the document tells of, and never a 500.

Not checked is whether every valid request is accepted: a schema cannot say that a prompt and its answer must fit
into the context, nor that 1.0 is not taken for an integer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from client_servers import serve
from environments import HERE, interpreter, run

from tests.e2e.live_server import LiveServer

EXAMPLES = 25
SEED = 7


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[LiveServer]:
    """The tiny model, which drafts for itself, with a context so short that every answer is."""
    draft = ("--speculative-config.model", str(tiny_folder), "--speculative-config.num_speculative_tokens", "3")
    shape = ("--served-model-name", "tiny", "--num-kv-blocks", "2048", "--max-model-len", "64")
    with serve(tmp_path_factory.mktemp("server"), str(tiny_folder), *shape, *draft) as server:
        yield server


@pytest.mark.timeout(900)
def test_every_answer_is_one_that_the_document_tells_of(short: LiveServer, tmp_path: Path) -> None:
    document = httpx.get(short.url + "/openapi.json", trust_env=False).json()
    operations = sum(len(item) for item in document["paths"].values())
    program = interpreter("schemathesis").with_name("schemathesis")
    checks = ("--checks", "all", "--exclude-checks", "positive_data_acceptance")
    amount = ("--max-examples", str(EXAMPLES), "--seed", str(SEED), "--no-shrink", "--continue-on-failure")
    output = ("--output-sanitize", "false", "--output-truncate", "false", "--report-dir", str(tmp_path))
    told = run(
        *(program, "--config-file", HERE / "inside" / "schemathesis.toml", "--no-color"),
        *("run", short.url + "/openapi.json", *checks, *amount, *output),
        seconds=850,
        PYTHONPATH=str(HERE / "inside"),
        SCHEMATHESIS_HOOKS="schemathesis_hooks",
    )
    assert re.search(rf"Tested: {operations}\b", told), told
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models/{model_id:path}"):
        answered = short.metric("outrider_http_requests_total", route=route, status="200")
        assert answered >= 3, f"{route} answered {answered} requests with 200; the rest proves little\n{told}"
    short.wait_for(short.is_idle)
    assert short.status("/health") == 200
