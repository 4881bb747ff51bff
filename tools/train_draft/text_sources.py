"""Items to ask about, from permissively licensed text of Debian packages: words, functions, paragraphs, descriptions.

wordnet-base (WordNet's licence), python3.11-doc and the standard library (PSF), descriptions of Debian packages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Word:
    """A word and its first sense."""

    text: str
    gloss: str


@dataclass(frozen=True)
class Function:
    """A function of the standard library."""

    module: str
    name: str
    signature: str
    summary: str
    """The docstring's first paragraph, on one line."""


def words(wordnet: Path, part: str) -> list[Word]:
    """Words that WordNet's own corpus uses, of one part of speech.

    Args:
        wordnet: the folder with `data.noun` and its like.
        part: "noun" or "verb".
    """
    glosses = {}
    for line in (wordnet / f"data.{part}").read_text(encoding="utf-8").splitlines():
        if not line.startswith("  "):
            glosses[line[:8]] = line.partition("| ")[2].partition(";")[0].strip()
    found = []
    for line in (wordnet / f"index.{part}").read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            continue
        fields = line.split()
        pointers = int(fields[3])
        tagged = int(fields[5 + pointers])
        if tagged and re.fullmatch(r"[a-z_]{3,}", fields[0]):
            found.append(Word(fields[0].replace("_", " "), glosses[fields[6 + pointers]]))
    return found


def functions(library: Path) -> Iterator[Function]:
    """Public functions with docstrings, of the modules in a folder and of its packages' modules."""
    for file in sorted(library.rglob("*.py")):
        if any(
            part in ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages") for part in file.parts
        ):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        module = ".".join(file.relative_to(library).with_suffix("").parts)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if 20 < len(summary) < 300:
                yield Function(module, node.name, f"def {node.name}({ast.unparse(node.args)}):", summary)


def paragraphs(sources: Path) -> Iterator[str]:
    """Paragraphs of prose from reStructuredText, without its marks."""
    for file in sorted(sources.rglob("*.rst.txt")):
        for block in re.split(r"\n\s*\n", file.read_text(encoding="utf-8")):
            text = " ".join(block.split())
            if not 150 < len(text) < 700 or block[0] in " .:*=-#+|>" or text.endswith("::") or text[-1] not in ".!?":
                continue
            text = re.sub(r":[\w:+-]+:`[!~.]?([^`<]*)(<[^`]*>)?`", lambda m: m[1].strip(), text)
            yield re.sub(r"``([^`]*)``", r"\1", re.sub(r"`([^`<]*) <[^`]*>`_+", r"\1", text))


def descriptions(dump: str) -> Iterator[tuple[str, str]]:
    """Names and one-line descriptions of packages, from the text that `apt-cache dumpavail` prints."""
    seen = set()
    for record in dump.split("\n\n"):
        name = re.search(r"^Package: (.+)$", record, re.M)
        text = re.search(r"^Description(?:-en)?: (.+)$", record, re.M)
        if name and text and text[1] not in seen:
            seen.add(text[1])
            yield name[1], text[1]
