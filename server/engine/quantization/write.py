"""Write a quantised copy of a plain checkpoint, by rounding to nearest: for tests and measurements, not for quality.

python -m server.engine.quantization.write PLAIN_DIR OUT_DIR --scheme int4_g128 --ignore lm_head
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from server.checkpoint.headers import INDEX, read_headers
from server.checkpoint.json_files import read_json_object
from server.checkpoint.locate import locate
from server.engine.loading.save import save_tensors
from server.engine.quantization.format import QuantizedFormat
from server.engine.quantization.modules import may_be_quantized, weight_modules
from server.engine.quantization.patterns import Pattern, patterns
from server.engine.quantization.quantize import quantize
from server.engine.quantization.schemes import LAYOUTS, SCHEMES, Layout, Scheme, metadata, scheme_format
from server.errors import UserError

IGNORED = ("lm_head",)
"""As most producers leave it."""


def write_quantized(
    plain: Path,
    out: Path,
    schemes: Sequence[tuple[str | None, str]],
    *,
    layout: Layout = "compressed-tensors",
    ignore: Sequence[str] = IGNORED,
    unlisted: Sequence[str] = (),
) -> dict[str, str]:
    """Quantise the linear layers of a checkpoint; all else is copied.

    Args:
        plain: folder of an unquantised safetensors checkpoint.
        out: folder to make; it may exist if it is empty.
        schemes: (pattern, scheme) pairs: the first one whose pattern fits a module, else the one with None.
        layout: names of the tensors and form of the metadata.
        ignore: modules that stay as they are, and are listed so, in the layout's own kind of patterns.
        unlisted: modules that stay as they are without a word in the metadata, as some producers leave them.

    Returns:
        Each quantised module and its format's label.

    Raises:
        UserError: nothing to read or to write to, an unknown scheme, or a checkpoint that is quantised already.
    """
    checkpoint = locate(str(plain))
    if checkpoint.format != "safetensors":
        raise UserError(f"{plain} holds no safetensors weights")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not an empty folder")
    left = [*_patterns(ignore, layout, "--ignore"), *_patterns(unlisted, layout, "--unlisted")]
    rules = [(_patterns([p] if p else [], layout, "--scheme-for"), scheme_format(s, layout)) for p, s in schemes]
    if layout == "fp8" and len(rules) > 1:
        raise UserError("the layout fp8 has one scheme for all modules; use --scheme alone")
    headers = read_headers(checkpoint)
    chosen: dict[str, QuantizedFormat] = {}
    for name, module in weight_modules(headers).items():
        if set(module.tensors) != {"weight"} or module.tensors["weight"].dtype not in ("BF16", "F16", "F32"):
            raise UserError(f"{plain}: {module.stored} is quantised already")
        format = next((f for pattern, f in rules if not pattern or pattern[0].matches([module.stored])), None)
        if format and may_be_quantized(name) and not any(pattern.matches([module.stored]) for pattern in left):
            chosen[module.stored] = format
    out.mkdir(parents=True, exist_ok=True)
    for path in sorted(plain.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX, "config.json"):
            shutil.copyfile(path, out / path.name)
    weight_map: dict[str, str] = {}
    for file in sorted({header.file for header in headers.values()}):
        tensors = _quantize_file(file, [name for name in headers if headers[name].file == file], chosen)
        save_tensors(tensors, out / file.name)
        weight_map |= dict.fromkeys(tensors, file.name)
    if (plain / INDEX).exists():
        (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2))
    # Last: without it the folder is no model, whatever happened before.
    config = read_json_object(plain / "config.json")
    described = [
        Scheme(format, pattern, [name for name, its in chosen.items() if its == format])
        for (pattern, _), (_, format) in zip(schemes, rules, strict=True)
    ]
    config["quantization_config"] = metadata(described, ignore, layout)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return {name: format.label for name, format in chosen.items()}


def _patterns(entries: Sequence[str], layout: Layout, where: str) -> tuple[Pattern, ...]:
    if layout == "compressed-tensors":
        return patterns(list(entries), "exact", where)
    return patterns(list(entries), "tree" if layout == "fp8" else "glob", where)


def _quantize_file(file: Path, names: Sequence[str], chosen: dict[str, QuantizedFormat]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    with safe_open(file, "pt") as source:
        for name in names:
            tensor = source.get_tensor(name)
            module, _, last = name.rpartition(".")
            if last == "weight" and module in chosen:
                parts = quantize(tensor, chosen[module])
                tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
            else:
                tensors[name] = tensor
    return tensors


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m server.engine.quantization.write", description=__doc__)
    parser.add_argument("plain", type=Path, metavar="PLAIN_DIR")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--scheme", help=f"of all modules that are not named otherwise: {SCHEMES}")
    parser.add_argument(
        "--scheme-for", nargs=2, action="append", default=[], metavar=("PATTERN", "SCHEME"), help="of some modules"
    )
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0], help="default: %(default)s")
    parser.add_argument("--ignore", nargs="*", default=list(IGNORED), help="left plain; default: lm_head")
    parser.add_argument("--unlisted", nargs="*", default=[], help="left plain, but not listed in the metadata")
    given = parser.parse_args(arguments)
    schemes = [(pattern, scheme) for pattern, scheme in given.scheme_for]
    schemes += [(None, given.scheme)] if given.scheme else []
    if not schemes:
        parser.error("--scheme or --scheme-for is needed")
    try:
        with torch.no_grad():
            done = write_quantized(
                given.plain, given.out, schemes, layout=given.layout, ignore=given.ignore, unlisted=given.unlisted
            )
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    counts = {label: list(done.values()).count(label) for label in sorted(set(done.values()))}
    told = ", ".join(f"{count} modules {label}" for label, count in counts.items()) or "nothing"
    sys.stdout.write(f"{given.out}: quantised {told}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
