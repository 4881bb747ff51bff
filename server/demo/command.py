"""`outrider demo moe`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from server.demo.write_moe import EXPERT_TYPES, write_moe


def demo_moe(flags: Sequence[str], console: Console) -> int:
    """Write the folder and say how to serve it.

    Raises:
        UserError: see `write_moe`.
    """
    parser = argparse.ArgumentParser(
        prog="outrider demo moe",
        description="Make a mixture of experts of the embedded model, with a trained MTP layer to speculate with.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--experts", choices=EXPERT_TYPES, default="int4", help="how experts are stored (int4)")
    asked = parser.parse_args(flags)
    with console.status(f"writing {asked.out}"):
        write_moe(asked.out, asked.experts)
    target = "--moe-backend torch_int4 " if asked.experts == "int4" else ""
    console.print(f"{asked.out} is ready: a mixture of experts ({asked.experts}) with a bf16 MTP layer. Serve it with")
    console.print(
        f"  outrider serve {asked.out} {target}"
        """--speculative-config '{"method": "mtp", "moe_backend": "grouped_mm", "num_speculative_tokens": 3}'""",
        markup=False,
        soft_wrap=True,
    )
    return 0
