"""LiteLLM and LangChain, in an environment of their own."""

from __future__ import annotations

import pytest
from environments import run_tests

from tests.e2e.live_server import LiveServer


@pytest.mark.parametrize("file", ["litellm_calls.py", "langchain_calls.py"])
def test_calls(file: str, tiny: LiveServer) -> None:
    run_tests("litellm", file, tiny.url, LITELLM_LOCAL_MODEL_COST_MAP="True", LANGSMITH_TRACING="false")
    tiny.wait_for(tiny.is_idle)
