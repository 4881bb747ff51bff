"""The command line: `outrider serve`, `check`, `bench http|decode|kernels`, `demo moe`, `--version`."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType

from rich.console import Console

from server.config_faults import UsageError, nearest
from server.errors import UserError
from server.flags import config_yaml, parse_check, parse_serve
from server.resolved_table import give_room

_USAGE = """\
usage: outrider COMMAND [flags]

  outrider serve [MODEL]   serve a model over the OpenAI API
  outrider check [MODEL]   show what serve would build, without loading weights
  outrider bench http      send load to an OpenAI server and measure it
  outrider bench decode    time an engine's decoding in this process, without HTTP
  outrider bench kernels   time attention and MoE backends side by side
  outrider demo moe        make a mixture of experts to try, of the embedded model
  outrider --version       print the version

Each command lists its flags with --help.
"""
_GROUPS = {
    "bench": """\
usage: outrider bench COMMAND [flags]

  outrider bench http      send load to an OpenAI server and measure it
  outrider bench decode    time an engine's decoding in this process, without HTTP
  outrider bench kernels   time attention and MoE backends side by side

Each command lists its flags with --help.
""",
    "demo": """\
usage: outrider demo COMMAND [flags]

  outrider demo moe        make a mixture of experts to try, of the embedded model

Each command lists its flags with --help.
""",
}
_COMMANDS = ("serve", "check", "bench", "demo", "--version", "--help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 for a failure that was explained, 2 for wrong usage."""
    try:
        return _run(sys.argv[1:] if argv is None else list(argv))
    except UsageError as error:
        sys.stderr.write(f"outrider: {error}\n")
        return 2
    except UserError as error:
        sys.stderr.write(f"outrider: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str]) -> int:
    match argv:
        case ["serve", *flags]:
            return _serve(flags)
        case ["check", *flags]:
            asked = parse_check(flags)
            from server.check import check

            return check(asked.settings, Console(highlight=False), as_json=asked.as_json)
        case ["bench", "http", *flags]:
            from server.bench.command import bench_http  # httpx is needed by this command alone

            return bench_http(flags, Console(highlight=False), Console(stderr=True))
        case ["bench", "decode", *flags]:
            from server.bench.decode import bench_decode

            return bench_decode(flags, Console(highlight=False), Console(stderr=True))
        case ["bench", "kernels", *flags]:
            from server.bench.kernels import bench_kernels

            return bench_kernels(flags, Console(highlight=False))
        case ["demo", "moe", *flags]:
            from server.demo.command import demo_moe

            return demo_moe(flags, Console(highlight=False))
        case [("bench" | "demo") as group, "--help" | "-h"]:
            sys.stdout.write(_GROUPS[group])
            return 0
        case ["bench", *_]:
            raise UsageError("say what to measure: outrider bench http, bench decode, or bench kernels")
        case ["demo", *_]:
            raise UsageError("say what to make: outrider demo moe")
        case ["--version" | "-V"]:
            sys.stdout.write(f"outrider {version('outrider')}\n")
            return 0
        case ["--help" | "-h"]:
            sys.stdout.write(_USAGE)
            return 0
        case []:
            sys.stderr.write(_USAGE)
            return 2
    raise UsageError(f"unknown command {argv[0]!r}{nearest(argv[0], _COMMANDS)}\n\n{_USAGE.rstrip()}")


def _leave(signal_number: int, frame: FrameType | None) -> None:
    """Until the server takes signals itself: process 1 of a container gets none that it has no handler for."""
    raise SystemExit(128 + signal_number)


def _serve(flags: list[str]) -> int:
    signal.signal(signal.SIGTERM, _leave)
    command = parse_serve(flags)
    settings = command.settings
    if command.print_config:
        sys.stdout.write(config_yaml(settings))
        return 0
    from server.listener import listen

    listener = listen(settings.host, settings.port)
    # Only now, with the port ours, what takes time to import: the HTTP framework.
    import setproctitle

    from server.launch import serve
    from server.logs import set_up_logging

    setproctitle.setproctitle("outrider: api")
    set_up_logging(settings.log_level, settings.log_format)
    console = Console(stderr=True)
    give_room(console)
    try:
        code = serve(settings, listener, console)
    except UserError as error:
        if settings.log_format == "human":
            raise
        logging.getLogger("server").error("%s", error)
        return 1
    if threading.active_count() > 1:
        # A download that nobody waits for any more: Python would wait for its threads.
        sys.stderr.flush()
        os._exit(code)
    return code
