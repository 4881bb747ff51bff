"""A MoE with a known right answer, served with drafts: the dense model's text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer
from oracle import Oracle, smollm2_model
from upcycled_folder import write_upcycled

pytestmark = pytest.mark.slow

NEW = 24
PROMPTS = (
    "The capital of France is",
    "one two three four one two three four one two",
    "<|im_start|>user\nSay hello, hello and hello again.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = write_upcycled(tmp_path_factory.mktemp("upcycled") / "moe")
    yield path
    (path / "model.safetensors").unlink()  # pytest would keep its two gigabytes for two more runs


@pytest.fixture(scope="module")
def dense() -> Oracle:
    return Oracle(smollm2_model())


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_text_is_that_of_the_dense_model(method: str, folder: Path, dense: Oracle, tmp_path: Path) -> None:
    flags = ["--speculative-config.method", method, "--speculative-config.num_speculative_tokens", "3"]
    if method == "draft_model":
        flags += ["--speculative-config.model", str(folder)]
    shape = ("--dtype", "float32", "--num-kv-blocks", "40", "--max-num-batched-tokens", "64")
    server = LiveServer(tmp_path, str(folder), *shape, *flags)
    try:
        server.wait_for(lambda: server.status("/ready") == 200, 240)
        for text in PROMPTS:
            prompt = server.encode(text)
            made = server.token_ids(prompt, max_tokens=NEW, ignore_eos=True)
            assert len(made) == NEW
            misses = dense.misses(prompt, made)
            assert all(miss.is_near_tie for miss in misses), misses
        drafted = server.metric("outrider_spec_decode_draft_tokens_total")
        accepted = server.metric("outrider_spec_decode_accepted_tokens_total")
        assert accepted > 0
        if method == "draft_model":
            assert accepted == drafted
        assert server.metric("outrider_model_info", role="target", architecture="Glm4MoeForCausalLM") == 1
    finally:
        server.kill()
