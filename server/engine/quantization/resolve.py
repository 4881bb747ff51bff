"""Decide for every module of a checkpoint how it is stored.

The headers of the tensors are the truth. Metadata is compared with them: known to leave out modules that were not
quantised (a note), but not to be believed where it denies what lies in the file (a problem of that module).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.headers import read_headers
from server.checkpoint.tensor_header import TensorHeader
from server.engine.models.config import ModelConfig
from server.engine.models.linear_names import linear_names, target_modules
from server.engine.quantization.declaration import Declaration, Refused
from server.engine.quantization.format import UNQUANTIZED, Unquantized, WeightFormat
from server.engine.quantization.formats import Formats, Problem, not_alike
from server.engine.quantization.ggml_formats import block_formats
from server.engine.quantization.metadata import read_declaration
from server.engine.quantization.modules import COMPUTED_TOGETHER, may_be_quantized, weight_modules
from server.engine.quantization.patterns import names_of
from server.engine.quantization.storage import PLAIN_DTYPES, stored_format


def resolve_formats(
    checkpoint: Checkpoint, config: ModelConfig, names: Iterable[str] | None = None, *, keep_blocks: bool = False
) -> Formats:
    """The formats of all linear modules in a checkpoint, those of a draft inside it included.

    Without weight files (load format dummy) the metadata alone decides.

    Args:
        checkpoint: as located.
        config: the model's that it holds; problems of the model's own modules are not overlooked.
        names: linear modules that will be built, where there is no file to tell; the model's unless given.
        keep_blocks: whether GGUF blocks stay as they are where they can be; else the loader dequantises them.

    Raises:
        UserError: the metadata cannot be understood, or its method is not supported. What only concerns some modules
            is raised when `Formats` is asked about them.
    """
    if checkpoint.format == "gguf":
        formats = dict.fromkeys(names or linear_names(config), UNQUANTIZED)
        return Formats({**formats, **(block_formats(checkpoint, config) if keep_blocks else {})})
    declaration = read_declaration(checkpoint)
    modules = weight_modules(read_headers(checkpoint))
    in_target = target_modules(config)
    by_module: dict[str, WeightFormat | Problem] = {}
    notes: dict[str, str] = {}
    if not modules:
        for name in names or linear_names(config):
            by_module[name] = _declared_alone(name, declaration)
    for name, (stored, tensors) in modules.items():
        found, note = _module(names_of(stored, name), tensors, declaration, strict=in_target(name))
        if not may_be_quantized(name):
            if not isinstance(found, Unquantized):
                tensor = next(iter(tensors.values()))
                by_module[name] = Problem(f"{tensor.file}: tensor {tensor.name}: {name} cannot be quantised")
        else:
            by_module[name] = found
            if note:
                notes[name] = note
    if config.tie_word_embeddings:
        by_module["lm_head"] = UNQUANTIZED
    _require_alike(by_module)
    return Formats(by_module, notes, declaration.method if declaration else None)


def _module(
    names: frozenset[str], tensors: Mapping[str, TensorHeader], declaration: Declaration | None, *, strict: bool
) -> tuple[WeightFormat | Problem, str | None]:
    """The verdict on one module, and a note where metadata is only incomplete."""
    declared, by = declaration.of(names) if declaration else (None, "")
    found = stored_format(tensors, None if isinstance(declared, Refused) else declared)
    if isinstance(found, Unquantized):
        agree = declared is None or declared == UNQUANTIZED
        return found, None if agree else "not quantised, though the metadata does not exclude them"
    if declared is None:
        return found, None if isinstance(found, Problem) else "quantised without any metadata"
    tensor = tensors.get("weight") or tensors.get("weight_packed")
    if tensor is None or tensor.dtype in PLAIN_DTYPES:
        return found, None  # a problem of its own
    stored = f"{tensor.file}: tensor {tensor.name} is stored as {tensor.dtype}"
    if isinstance(declared, Refused):
        return Problem(f"{stored}, and {by} names it: {declared.reason}"), None
    if isinstance(declared, Unquantized):
        return Problem(f"{stored}, but {by} says that it is not quantised"), None
    if isinstance(found, Problem) or found.label == declared.label:
        return found, None
    if strict:
        return Problem(f"{stored} ({found.label}), but {by} says {declared.label}"), None
    return found, f"stored as {found.label}, though the metadata says {declared.label}"


def _declared_alone(name: str, declaration: Declaration | None) -> WeightFormat | Problem:
    if declaration is None:
        return UNQUANTIZED
    declared, by = declaration.of(names_of(name, name))
    return Problem(f"{name}: {declared.reason} ({by})") if isinstance(declared, Refused) else declared


def _require_alike(by_module: dict[str, WeightFormat | Problem]) -> None:
    """Turn modules that are computed together and stored differently into problems."""
    for together in COMPUTED_TOGETHER:
        groups: dict[str, list[str]] = {}
        for name in by_module:
            match = together.fullmatch(name)
            if match:
                groups.setdefault(match[1], []).append(name)
        for names in groups.values():
            formats = {name: by_module[name] for name in names}
            plain = {name: format for name, format in formats.items() if not isinstance(format, Problem)}
            first = next(iter(plain), None)
            other = next((name for name in plain if first and plain[name] != plain[first]), None)
            if first and other and len(plain) == len(formats):
                by_module |= dict.fromkeys(names, Problem(not_alike(first, plain[first], other, plain[other])))
