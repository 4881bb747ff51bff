"""`python -m tools.train_draft answer | hidden | train | report`: see README.md beside this file."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from server.errors import UserError
from tools.train_draft.commands import parse


def main() -> int:
    """Run one command; 1 after a failure that was explained."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        command = parse(sys.argv[1:])
        with Progress(*columns, console=console) as progress:
            command(progress)
    except UserError as error:
        sys.stderr.write(f"train_draft: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
