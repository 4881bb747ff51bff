"""The page at / in headless Chromium, driven by Playwright; set SCREENSHOT to a path to look at it."""

from __future__ import annotations

import os
import shutil

import pytest
from environments import HERE, need, run

from tests.e2e.live_server import LiveServer


def test_the_playground_in_a_browser(tiny: LiveServer) -> None:
    need(HERE / "node" / "node_modules" / ".made")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        if os.environ.get("CLIENTS_REQUIRED"):
            pytest.fail("no Chromium: `make .tools/chromium` installs Debian's")
        pytest.skip("no Chromium")
    more = {"SCREENSHOT": os.environ["SCREENSHOT"]} if "SCREENSHOT" in os.environ else {}
    file = HERE / "node" / "playground.test.mjs"
    run("node", "--test", "--test-reporter=spec", file, SERVER_URL=tiny.url, CHROMIUM=browser, **more)
    tiny.wait_for(tiny.is_idle)
