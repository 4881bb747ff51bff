"""`outrider demo moe`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from server.demo.write_moe import EXPERT_TYPES, ExpertType, write_moe
from server.flags import Parser


def demo_moe(flags: Sequence[str], console: Console) -> int:
    """Write the folder and say how to serve it.

    Raises:
        UsageError: a bad flag.
        UserError: see `write_moe`.
    """
    parser = Parser(
        prog="outrider demo moe",
        description="Make a mixture of experts of the embedded model. Where its trained MTP layer is packaged, that is "
        "a part of it, to speculate with.",
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument("--experts", choices=EXPERT_TYPES, default="int4", help="how experts are stored (int4)")
    asked = parser.parse_known(flags)
    with console.status(f"writing {asked.out}"):
        with_mtp = write_moe(asked.out, asked.experts)
    told = ready_text(asked.out, asked.experts, with_mtp=with_mtp)
    console.print(told, markup=False, highlight=False, soft_wrap=True)
    return 0


def ready_text(out: Path, experts: ExpertType, *, with_mtp: bool) -> str:
    """What was written, and a command that serves it.

    Args:
        out: the folder.
        experts: how the target's experts are stored.
        with_mtp: whether an MTP layer is in it; the trained one may not be packaged.
    """
    target = "--moe-backend torch_int4 " if experts == "int4" else ""
    if with_mtp:
        layer = "with a bf16 MTP layer"
        draft = '{"method": "mtp", "moe_backend": "grouped_mm", "num_speculative_tokens": 3}'
    else:
        layer = "without an MTP layer, since none is packaged here"
        draft = '{"method": "ngram"}'
    return (
        f"{out} is ready: a mixture of experts ({experts}) {layer}. Serve it with\n"
        f"  outrider serve {shlex.quote(str(out))} {target}--speculative-config '{draft}'"
    )
