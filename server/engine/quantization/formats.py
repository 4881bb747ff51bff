"""Which module of a checkpoint is stored how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from server.engine.quantization.format import UNQUANTIZED, Unquantized, WeightFormat
from server.errors import UserError

BESIDE_A_WEIGHT = ("input_scale", "activation_scale", "input_global_scale")
"""Scales of quantised activations. Activations stay in the model's dtype here, which is closer to the original."""
BESIDE_THE_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale")
"""Scales of a quantised KV cache."""


@dataclass(frozen=True)
class Problem:
    """A module that cannot be served, and why; of no consequence to those who do not build it."""

    message: str


def everything(module: str) -> bool:
    """Select all modules."""
    return True


@dataclass(frozen=True)
class Formats:
    """The formats of a checkpoint's linear modules, by their Hugging Face names (unfused, without `.weight`)."""

    by_module: Mapping[str, WeightFormat | Problem] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    """By module: where tensors and metadata differ harmlessly."""
    method: str | None = None
    """`quant_method` of the metadata; None when there is none."""

    def format_of(self, module: str) -> WeightFormat:
        """The format of a module; one that the checkpoint lacks counts as unquantised, and loading will miss it.

        Raises:
            UserError: it is stored in a way that is not supported, or that contradicts the metadata.
        """
        found = self.by_module.get(module, UNQUANTIZED)
        if isinstance(found, Problem):
            raise UserError(found.message)
        return found

    def lacks(self, modules: Iterable[str]) -> bool:
        """Whether the checkpoint, of which something is known, holds none of the modules."""
        return bool(self.by_module) and not any(module in self.by_module for module in modules)

    def common(self, modules: Iterable[str]) -> WeightFormat:
        """The one format of modules that are computed together.

        Those that the checkpoint lacks go by the others: how they should be stored, loading says when it misses them.

        Raises:
            UserError: they differ, or one of them has a problem.
        """
        modules = list(modules)
        formats = {module: self.format_of(module) for module in modules if module in self.by_module}
        formats = formats or dict.fromkeys(modules, UNQUANTIZED)
        first, *others = formats
        for other in others:
            if formats[other] != formats[first]:
                raise UserError(not_alike(first, formats[first], other, formats[other]))
        return formats[first]

    def labels(self, belongs: Callable[[str], bool] = everything) -> set[str]:
        """The labels of all modules that belong, such as {"int4_g128", "none"}; {"none"} if there are no modules.

        Args:
            belongs: selects the modules of one role, by name.

        Raises:
            UserError: one of them cannot be served.
        """
        return {self.format_of(module).label for module in self.by_module if belongs(module)} or {UNQUANTIZED.label}

    def experts(self, belongs: Callable[[str], bool] = everything) -> frozenset[WeightFormat]:
        """The formats of all routed experts that belong: what a MoE backend needs to support. Empty without experts.

        Raises:
            UserError: one of them cannot be served.
        """
        names = (module for module in self.by_module if ".experts." in module and belongs(module))
        return frozenset(self.format_of(module) for module in names)

    def why(self, belongs: Callable[[str], bool] = everything) -> str:
        """Where the formats come from, with the notes of the modules that belong: for the table of the plan."""
        source = f"the tensors; metadata: {self.method}" if self.method else "the tensors; no metadata"
        modules: dict[str, list[str]] = {}
        for module, note in self.notes.items():
            if belongs(module):
                modules.setdefault(note, []).append(module)
        told = [f"{_count(names)} {note}" for note, names in modules.items()]
        return "; ".join([source, *told])

    def leaves_aside(self, tensor: str) -> bool:
        """Whether a tensor only matters to those who quantise activations or the cache."""
        module, _, last = tensor.rpartition(".")
        if last in BESIDE_A_WEIGHT:
            return module in self.by_module and not isinstance(self.by_module[module], Unquantized)
        return last in BESIDE_THE_CACHE and self.method is not None


def not_alike(first: str, first_format: WeightFormat, other: str, other_format: WeightFormat) -> str:
    """The message about two modules that are computed together."""
    return (
        f"{first} is stored as {_describe(first_format)} and {other} as {_describe(other_format)}; modules that are "
        "computed together must be stored alike"
    )


def _describe(format: WeightFormat) -> str:
    # The names of the tensors tell what labels may hide.
    return "unquantised" if isinstance(format, Unquantized) else f"{format.label} ({', '.join(format.tensors(1, 1))})"


def _count(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} modules ({names[0]}, …)"
