"""`outrider bench decode`: time per token of an engine in this process, without HTTP, by batch size."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from server.bench.shapes import SHAPES, eagle3_head, write_shape
from server.config_faults import UsageError
from server.flags import Parser, given_settings, resolved_settings, settings_parser

if TYPE_CHECKING:
    from server.engine.measure import DecodeBench, DecodeFigures
    from server.messages import EngineReady

_DESCRIPTION = """\
Decode in this process, without HTTP, and print the time per token by batch size: (time of 136 tokens - time of 8) / 128
of the best of several runs. Beside it stands the floor: the bytes that a step must read (weights, the experts that its
tokens hit, keys and values) over the bandwidth of a copy, measured in the same run.

All flags of `outrider serve` hold, with random weights of a known --shape instead of MODEL if wanted. A draft of method
eagle3 then needs no model: a head of the published size is made up."""
_DRAFT_MODEL = "speculative.model"


def decode_parser() -> Parser:
    """The parser of `outrider bench decode`."""
    parser, own = settings_parser("bench decode", _DESCRIPTION)
    own.add_argument("--shape", choices=sorted(SHAPES), help="Random weights of this shape instead of MODEL.")
    own.add_argument(
        "--batch-sizes", type=sizes, metavar="N,N,…", help="Sequences that decode together. [default: 1,8,32,128]"
    )
    own.add_argument("--prompt-tokens", type=positive, metavar="COUNT", help="Length of prompts. [default: 512]")
    own.add_argument("--repeats", type=positive, metavar="COUNT", help="Runs, of which the best counts. [default: 3]")
    own.add_argument("--json", type=Path, metavar="PATH", help="Also write the figures as JSON.")
    return parser


def bench_decode(argv: Sequence[str], out: Console, progress: Console) -> int:
    """Measure what `argv` asks for, print a table on `out`; 0.

    Raises:
        UsageError: a bad flag.
        UserError: the engine cannot start or run.
    """
    given = given_settings(decode_parser(), argv)
    batches = given.pop("batch_sizes", (1, 8, 32, 128))
    prompt_tokens, repeats = given.pop("prompt_tokens", 512), given.pop("repeats", 3)
    json_path, shape = given.pop("json", None), given.pop("shape", None)
    with tempfile.TemporaryDirectory(prefix="outrider-shape-") as folder:
        if shape is not None:
            _use_shape(given, shape, Path(folder))
        settings = resolved_settings(
            {"enable_prefix_caching": False, "max_num_seqs": str(max(batches)), "log_level": "warning"} | given
        )
        # Torch takes seconds to import.
        from server.engine.measure import DecodeBench, Workload

        bench = DecodeBench(settings, Workload(batches, prompt_tokens, repeats, settings.seed))
        show_engine(bench, progress)
        figures = []
        for one in bench.run():
            progress.print(f"batch {one.batch}: {one.ms_per_token:.3f} ms per token")
            figures.append(one)
    show(figures, prompt_tokens, out)
    if json_path is not None:
        report = report_json(figures, bench.ready, bench.bandwidth, shape or str(settings.model), prompt_tokens)
        json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


def _use_shape(given: dict[str, Any], shape: str, folder: Path) -> None:
    if "model" in given:
        raise UsageError(f"--shape {shape} stands in place of MODEL; leave one of them out")
    given["model"] = str(write_shape(folder / shape, SHAPES[shape]))
    given.setdefault("load_format", "dummy")
    keys = _draft_keys(given)
    if keys.get("method") == "eagle3" and "model" not in keys:
        given[_DRAFT_MODEL] = str(write_shape(folder / "head", eagle3_head(SHAPES[shape])))


def _draft_keys(given: dict[str, Any]) -> dict[str, Any]:
    keys = {name.partition(".")[2]: value for name, value in given.items() if name.startswith("speculative.")}
    try:
        whole = json.loads(given.get("speculative", "{}"))
    except json.JSONDecodeError:
        return keys  # `resolved_settings` says what is wrong with it
    return {**whole, **keys} if isinstance(whole, dict) else keys


def show_engine(bench: DecodeBench, console: Console) -> None:
    """One line a role on what was built."""
    ready = bench.ready
    for role in dict.fromkeys(row.role for row in ready.rows):
        held = ", ".join(f"{row.component} {row.resolved}" for row in ready.rows if row.role == role)
        console.print(f"{role}: {held}", highlight=False, soft_wrap=True)
    console.print(
        f"{ready.device}, ready in {ready.load_seconds:.1f} s, KV cache {ready.kv_bytes / 2**30:.1f} GiB, "
        f"copy bandwidth {bench.bandwidth / 1e12:.3f} TB/s",
        highlight=False,
        soft_wrap=True,
    )


def show(figures: Iterable[DecodeFigures], prompt_tokens: int, console: Console) -> None:
    """Print the figures for people."""
    table = Table(box=None, pad_edge=False)
    columns = ("batch", "ms/token", "tok/s", "floor ms", "share of floor", "tokens/step", "prompts + 8 tokens s")
    for title in columns:
        table.add_column(title, justify="right")
    for one in figures:
        length = "" if one.acceptance_length is None else f"{one.acceptance_length:.2f}"
        table.add_row(
            str(one.batch),
            f"{one.ms_per_token:.3f}",
            f"{one.tokens_per_second:.0f}",
            f"{one.floor_ms:.3f}",
            f"{one.share_of_floor:.0%}",
            length,
            f"{one.first_tokens_seconds:.3f}",
        )
    console.print(f"prompts of {prompt_tokens} tokens, greedy", highlight=False)
    console.print(table)


def report_json(
    figures: Iterable[DecodeFigures], ready: EngineReady, bandwidth: float, model: str, prompt_tokens: int
) -> dict[str, Any]:
    """The figures and what they were measured on, as plain values."""
    return {
        "model": model,
        "prompt_tokens": prompt_tokens,
        "device": ready.device,
        "load_seconds": ready.load_seconds,
        "copy_bytes_per_second": bandwidth,
        "rows": [
            {"role": row.role, "component": row.component, "resolved": row.resolved, "why": row.why}
            for row in ready.rows
        ],
        "figures": [
            {name: getattr(one, name) for name in (*one.__struct_fields__, "share_of_floor")} for one in figures
        ],
    }


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, with commas in between."""
    return tuple(positive(part) for part in text.split(","))


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value
