"""`outrider bench kernels`: attention and MoE backends side by side, one layer at a time."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict
from rich.console import Console
from rich.table import Table

from server.bench.decode import positive, sizes
from server.bench.shapes import SHAPES
from server.flags import Parser

if TYPE_CHECKING:
    from server.engine.measure_backends import BackendFigure

_DESCRIPTION = """\
Time every attention and MoE backend of this build on one layer of a shape, with random numbers: decoding of so many
sequences together. Backends whose work can be captured run from a CUDA graph, as they do when serving."""


def kernels_parser() -> Parser:
    """The parser of `outrider bench kernels`."""
    parser = Parser(
        prog="outrider bench kernels",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b", help="whose layers [default: %(default)s]")
    add(
        "--batch-sizes",
        type=sizes,
        default=(1, 8, 32, 128),
        metavar="N,N,…",
        help="sequences that decode together [default: 1,8,32,128]",
    )
    add("--context", type=positive, default=640, help="tokens of each in the cache [default: %(default)s]")
    add("--json", type=Path, metavar="PATH", help="also write the figures as JSON")
    return parser


def bench_kernels(argv: Sequence[str], out: Console) -> int:
    """Measure what `argv` asks for and print a table; 0.

    Raises:
        UsageError: a bad flag.
    """
    args = kernels_parser().parse_known(argv)
    # Torch takes seconds to import.
    from server.engine.measure_backends import bench_backends

    bench = bench_backends(SHAPES[args.shape], args.batch_sizes, args.context)
    figures = list(bench.run())
    out.print(f"{args.shape}, {bench.device_name}, copy bandwidth {bench.bandwidth / 1e9:.0f} GB/s", highlight=False)
    show(figures, out)
    if args.json is not None:
        report = {
            "shape": args.shape,
            "device": bench.device_name,
            "copy_bytes_per_second": bench.bandwidth,
            "figures": [asdict(figure) for figure in figures],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def show(figures: Sequence[BackendFigure], console: Console) -> None:
    """One line for each work, one column for each backend; then those that cannot serve."""
    for component in dict.fromkeys(figure.component for figure in figures):
        own = [figure for figure in figures if figure.component == component and figure.milliseconds is not None]
        table = Table(box=None, pad_edge=False)
        table.add_column(component)
        names = list(dict.fromkeys(figure.backend for figure in own))
        for name in names:
            table.add_column(f"{name}, us", justify="right")
            table.add_column("GB/s", justify="right")
        by_place = {(figure.work, figure.backend): figure for figure in own}
        for work in dict.fromkeys(figure.work for figure in own):
            cells = []
            for name in names:
                figure = by_place[work, name]
                assert figure.milliseconds is not None
                cells += [f"{1000 * figure.milliseconds:.1f}", f"{figure.gigabytes_per_second:.0f}"]
            table.add_row(work, *cells)
        console.print(table)
        for figure in figures:
            if figure.component == component and figure.why_not:
                console.print(f"{figure.backend}: cannot serve: {figure.why_not}", highlight=False, soft_wrap=True)
