"""Module names in the lists of quantisation metadata: each method's own rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from server.errors import UserError

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(\w+)")


@dataclass(frozen=True)
class Pattern:
    """One entry of a list.

    exact: the name itself, or a regular expression after "re:", which must fit from the start (compressed-tensors).
    tree: the name of a module or of a part of the model that holds it, whole or its last parts (fp8).
    glob: with * and ?; a * at the end only ends a part of the name, so that `layers.6*` is not layer 60 (modelopt).
    """

    text: str
    style: Literal["exact", "tree", "glob"]

    @property
    def regular(self) -> bool:
        """Whether it is a regular expression."""
        return self.style != "glob" and self.text.startswith("re:")

    def matches(self, names: Iterable[str]) -> bool:
        """Whether it names the module that goes by these names."""
        return any(self._matches(name) for name in names)

    def _matches(self, name: str) -> bool:
        if self.regular:
            return re.match(self.text[3:], name) is not None
        if self.style == "exact":
            return name == self.text
        if self.style == "tree":
            return f".{name}.".endswith(f".{self.text}.") or name.startswith(f"{self.text}.")
        stem = self.text if self.text.endswith(".*") else self.text.rstrip("*")
        return not stem or fnmatchcase(name, stem) or fnmatchcase(name, f"{stem}.*")


def patterns(entries: object, style: Literal["exact", "tree", "glob"], where: str) -> tuple[Pattern, ...]:
    """Check a list from a config; None is an empty one.

    Raises:
        UserError: not a list of names, or a regular expression that cannot be one.
    """
    if entries is None:
        return ()
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise UserError(f"{where} is {entries!r}; it must be a list of module names")
    for entry in entries:
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except re.error as error:
                raise UserError(f"{where}: {entry!r} is not a regular expression: {error}") from error
    return tuple(Pattern(entry, style) for entry in entries)


def names_of(stored: str, mapped: str) -> frozenset[str]:
    """All names that a list may have for a module: as stored, as mapped, and those of the modules it is fused into."""
    names = {stored, mapped}
    for name in (stored, mapped):
        parent, _, leaf = name.rpartition(".")
        if leaf in _FUSED:
            names.add(f"{parent}.{_FUSED[leaf]}")
        expert = _EXPERT.fullmatch(name)
        if expert:
            names.add(f"{expert[1]}.{_FUSED.get(expert[2], expert[2])}")
    return frozenset(names)
