"""What a checkpoint's metadata says about the storage of its modules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from server.engine.quantization.format import UNQUANTIZED, WeightFormat
from server.engine.quantization.patterns import Pattern


@dataclass(frozen=True)
class Refused:
    """A scheme that metadata can name and this build cannot read."""

    reason: str


class Declared(NamedTuple):
    """The answer for one module."""

    format: WeightFormat | Refused
    by: str
    """The key, and the entry if there is one, that says so."""


@dataclass(frozen=True)
class Group:
    """Modules that share a scheme."""

    key: str
    targets: tuple[Pattern, ...] | None
    """None means every linear module."""
    format: WeightFormat | Refused


@dataclass(frozen=True)
class Declaration:
    """Quantisation metadata of one checkpoint."""

    method: str
    """`quant_method`."""
    where: str
    """File and key, for errors."""
    ignored: tuple[Pattern, ...]
    ignored_key: str
    groups: tuple[Group, ...]

    def of(self, names: frozenset[str]) -> Declared:
        """What is said about the module that goes by these names."""
        for pattern in self.ignored:
            if pattern.matches(names):
                return Declared(UNQUANTIZED, f"{self.ignored_key} entry {pattern.text!r} in {self.where}")
        # The most particular word counts: a name, then a regular expression, then what is said about all.
        for regular in (False, True):
            for group in self.groups:
                targets = [target for target in group.targets or () if target.regular == regular]
                if any(target.matches(names) for target in targets):
                    return Declared(group.format, f"{group.key} in {self.where}")
        for group in self.groups:
            if group.targets is None:
                return Declared(group.format, f"{group.key} in {self.where}")
        return Declared(UNQUANTIZED, f"{self.where}, in which no group names it,")
