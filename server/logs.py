"""Logging on stderr, for people or as JSON; set up once per process."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["human", "json"]
Process = Literal["api", "engine"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the HTTP request that the running task serves."""

_PROBES = ("/health", "/ready", "/metrics")


def fields(**values: Any) -> dict[str, Any]:
    """For `extra`: what a message says, as keys of its own in JSON; people get the message alone."""
    return {"fields": values}


class _NoProbes(logging.Filter):
    """Leaves the questions of probes and scrapers, several a second, out of the access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record of one answered request is worth a line."""
        path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
        return str(path).split("?")[0] not in _PROBES


class HumanFormatter(logging.Formatter):
    """One line: time, level, logger, message, and the id of the request in whose course it was said."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        line = super().formatMessage(record)
        asked = request_id.get()
        return f"{line} [{asked}]" if asked else line


class JSONFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, process, message; request_id, fields and exception if any."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """The object as one line of ASCII."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if asked := request_id.get():
            line["request_id"] = asked
        said = getattr(record, "fields", None)
        if isinstance(said, Mapping):
            line |= {name: value for name, value in said.items() if name not in line}
        line |= _access(record)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _access(record: logging.LogRecord) -> dict[str, Any]:
    """The parts of uvicorn's line on an answered request."""
    if record.name != "uvicorn.access" or not isinstance(record.args, tuple) or len(record.args) != 5:
        return {}
    client, method, path, _, status = record.args
    return {"client": client, "method": method, "path": path, "status": status}


def set_up_logging(level: str, log_format: LogFormat = "human", process: Process = "api") -> None:
    """Log everything of at least `level` (debug, info, warning, error) in one line each.

    Args:
        level: the least weight that counts.
        log_format: for people, or JSON.
        process: which of the two this is.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter(process) if log_format == "json" else HumanFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(log_format == "json")
    for name in ("httpx", "httpcore", "asyncio", "filelock", "urllib3"):  # their info is our debug
        logging.getLogger(name).setLevel(logging.WARNING)
    # uvicorn tells its own life in info lines; ours are the ones that count
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    access = logging.getLogger("uvicorn.access")
    access.filters = [_NoProbes()]
