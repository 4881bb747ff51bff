"""`outrider serve` with the engine program of the tests: ENGINE_ARGUMENTS -- SERVE_ARGUMENTS."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from server.errors import UserError
from server.flags import parse_serve
from server.launch import serve
from server.listener import listen
from server.logs import set_up_logging

if __name__ == "__main__":
    split = sys.argv.index("--")
    engine = [sys.executable, str(Path(__file__).with_name("scripted_engine.py")), *sys.argv[1:split]]
    settings = parse_serve(sys.argv[split + 1 :]).settings
    set_up_logging(settings.log_level)
    try:
        sys.exit(serve(settings, listen(settings.host, settings.port), Console(stderr=True), engine))
    except UserError as error:
        sys.stderr.write(f"outrider: {error}\n")
        sys.exit(1)
