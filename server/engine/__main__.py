"""The engine process: `python -m server.engine --config-file PATH --link DIR`. Started by the API process only."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from pathlib import Path

import setproctitle

from server.config import Settings
from server.engine.link import EngineLink
from server.engine.process import die_with_parent, leave_signals_to_parent, wait_briefly
from server.errors import UserError
from server.logs import set_up_logging
from server.messages import EngineFailed

logger = logging.getLogger("server.engine")


def main() -> int:
    """Load, serve until told to shut down.

    Returns:
        0 after a shutdown, 1 when the start failed for a reason that was sent to the API process.
    """
    parser = argparse.ArgumentParser(prog="server.engine")
    parser.add_argument("--config-file", type=Path, required=True)
    parser.add_argument("--link", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True, help="pid of the API process; the engine ends with it")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    setproctitle.setproctitle("outrider: engine")
    leave_signals_to_parent()
    wait_briefly()
    settings = Settings.model_validate_json(arguments.config_file.read_text())
    set_up_logging(settings.log_level, settings.log_format, "engine")
    link = EngineLink(arguments.link)
    try:
        # Importing torch takes seconds; the API process is told of failures from here on.
        from server.engine.start import start_engine

        core = start_engine(settings, link).core
    except UserError as error:
        link.send(EngineFailed(str(error)))
        link.close()
        return 1
    # What was built at the start lives for ever: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    core.run()
    link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
