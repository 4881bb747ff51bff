"""What a person sees while the server starts: progress, then the table of what was resolved, then the ready line."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from server.activity import SYNTHETIC
from server.config import Settings
from server.messages import EngineReady, SpeculativeInfo
from server.resolved_table import kv_group_line, resolved_table

_GIB = 2**30


class StartupDisplay:
    """Shows the start on a console: bars on a terminal, a line per stage elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._stage = ""
        self._bars: Progress | None = None
        self._bar: TaskID | None = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
                console=console,
                transient=True,
            )

    def progress(self, stage: str, done: int, total: int) -> None:
        """Start-up work has come to `done` of `total`."""
        is_new, self._stage = stage != self._stage, stage
        if self._bars is None:
            if is_new:
                self._line(f"{stage} …")
            return
        if self._bar is None or is_new:
            self._bars.start()
            self._bar = self._bars.add_task(stage)
        self._bars.update(self._bar, completed=done, total=total)

    def stop(self) -> None:
        """Take the bars away."""
        if self._bars is not None:
            self._bars.stop()

    def begin(self, source: str, url: str, settings: Settings) -> None:
        """Say what is being served, where, and which settings are not the defaults."""
        self._line(f"serving {source} on {url} (loading)")
        given = settings.model_dump(exclude_defaults=True, exclude={"api_key", "model"})
        if given:
            self._line("settings: " + ", ".join(f"{name}={value}" for name, value in given.items()))
        if not settings.api_key and settings.host not in ("127.0.0.1", "localhost", "::1"):
            self._line("no --api-key: everyone who reaches this address may use the model")

    def found(self, source: str, path: str) -> None:
        """Say where the model was found."""
        self._line(f"model: {path}" if source == path else f"model: {source}, {path}")

    def formats(self, formats: str) -> None:
        """Say how answers are read."""
        self._line(formats)

    def ready(self, ready: EngineReady, url: str, model_name: str, defaults: Mapping[str, Any], *, keyed: bool) -> None:
        """Show what the engine built, and how to call it."""
        self.stop()
        self._console.print(resolved_table(ready.rows))
        tokens = sum(group.num_blocks * group.block_size for group in ready.kv_groups)
        for group in ready.kv_groups:
            self._line(kv_group_line(group))
        self._line(
            f"KV cache: {tokens} tokens, {ready.kv_bytes / _GIB:.2f} GiB; longest sequence {ready.max_model_len} tokens"
        )
        for model in ready.models:
            self._line(f"{model.role}: {model.architecture}, {model.parameters:,} parameters on {ready.device}")
        if ready.speculative is not None:
            self._speculation(ready.speculative)
        if defaults:
            shown = ", ".join(f"{name} {value}" for name, value in defaults.items())
            self._line(f"sampling defaults from generation_config.json: {shown} (--generation-config none: without)")
        self._line(f"ready at {url} after {time.monotonic() - self._started:.1f} s; try:")
        self._console.print(
            example_request(url, model_name, keyed=keyed), markup=False, highlight=False, soft_wrap=True
        )

    def _speculation(self, info: SpeculativeInfo) -> None:
        up_to = "up to " if info.adaptive else ""
        self._line(
            f"speculation: {info.method}, {up_to}{info.num_speculative_tokens} tokens a draft, "
            f"{info.draft_sample_method} drafts"
        )
        if info.synthetic:
            self._console.print(Panel(Text(SYNTHETIC, style="bold red"), border_style="red"))

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def example_request(url: str, model_name: str, *, keyed: bool) -> str:
    """A curl command that asks the server something."""
    body = json.dumps(
        {
            "model": model_name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 64,
        },
        ensure_ascii=False,
    ).replace("'", "'\\''")
    key = " -H 'Authorization: Bearer '\"$OUTRIDER_API_KEY\"" if keyed else ""
    return f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'"
