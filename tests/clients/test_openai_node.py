"""npm's `openai` and `ai` packages, by tests of their own in Node's test runner."""

from __future__ import annotations

import pytest
from client_servers import KEY
from environments import HERE, need, run

from tests.e2e.live_server import LiveServer


@pytest.mark.parametrize("file", ["openai.test.mjs", "ai_sdk.test.mjs"])
def test_node(file: str, tiny: LiveServer, narrow: LiveServer) -> None:
    need(HERE / "node" / "node_modules" / ".made")
    urls = {"SERVER_URL": tiny.url, "NARROW_URL": narrow.url}
    run("node", "--test", "--test-reporter=spec", HERE / "node" / file, NARROW_KEY=KEY, **urls)
    tiny.wait_for(tiny.is_idle)
    narrow.wait_for(narrow.is_idle)
