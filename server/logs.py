"""Logging for people, on stderr; set up once per process."""

from __future__ import annotations

import logging
import sys

_PROBES = ("/health", "/ready", "/metrics")


class _NoProbes(logging.Filter):
    """Leaves the questions of probes and scrapers, several a second, out of the access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record of one answered request is worth a line."""
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return str(path).split("?")[0] not in _PROBES


def set_up_logging(level: str) -> None:
    """Log everything of at least `level` (debug, info, warning, error) in one line each."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for name in ("httpx", "httpcore", "asyncio", "filelock", "urllib3"):  # their info is our debug
        logging.getLogger(name).setLevel(logging.WARNING)
    # uvicorn tells its own life in info lines; ours are the ones that count
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    access = logging.getLogger("uvicorn.access")
    access.filters = [_NoProbes()]
