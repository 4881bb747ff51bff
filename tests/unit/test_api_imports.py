from __future__ import annotations

import subprocess
import sys


def test_the_app_loads_without_torch_or_the_engine() -> None:
    code = (
        "import sys, server.api.app; print([m for m in sys.modules if m in ('torch', 'transformers', 'server.engine')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
