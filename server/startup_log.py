"""The start as log messages, for whoever reads logs by machine: what `server.startup` shows to people."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from server.config import Settings
from server.logs import fields
from server.messages import EngineReady

_log = logging.getLogger("server.startup")


class StartupLog:
    """Takes the place of a `StartupDisplay`."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._stage = ""

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say when another stage of the start-up work begins."""
        if stage != self._stage:
            self._stage = stage
            _log.info("%s", stage)

    def stop(self) -> None:
        """There is nothing to take away."""

    def begin(self, source: str, url: str, settings: Settings) -> None:
        """Say what is being served, where, and which settings are not the defaults."""
        given = settings.model_dump(mode="json", exclude_defaults=True, exclude={"api_key", "model"})
        _log.info("serving %s on %s (loading)", source, url, extra=fields(model=source, url=url, settings=given))

    def found(self, source: str, path: str) -> None:
        """Say where the model was found."""
        _log.info("model: %s, %s", source, path, extra=fields(model=source, path=path))

    def formats(self, formats: str) -> None:
        """Say how answers are read."""
        _log.info("%s", formats)

    def ready(self, ready: EngineReady, url: str, model_name: str, defaults: Mapping[str, Any], *, keyed: bool) -> None:
        """Say what the engine built, a message for each component, and that requests may come."""
        for row in ready.rows:
            shown = {"role": row.role, "component": row.component, "requested": row.requested}
            shown |= {"resolved": row.resolved, "source": row.source, "why": row.why}
            _log.info("%s %s: %s (%s)", row.role, row.component, row.resolved, row.requested, extra=fields(**shown))
        tokens = sum(group.num_blocks * group.block_size for group in ready.kv_groups)
        _log.info(
            "KV cache: %d tokens; longest sequence %d tokens",
            tokens,
            ready.max_model_len,
            extra=fields(kv_tokens=tokens),
        )
        seconds = round(time.monotonic() - self._started, 1)
        _log.info(
            "ready at %s after %.1f s",
            url,
            seconds,
            extra=fields(
                url=url, seconds=seconds, served_model_name=model_name, api_keys=keyed, defaults=dict(defaults)
            ),
        )
