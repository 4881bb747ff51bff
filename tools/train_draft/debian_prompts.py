"""Prompts from templates over text of Debian packages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.train_draft import templates
from tools.train_draft.text_sources import Function, Word, descriptions, functions, paragraphs, words

Prompt = dict[str, Any]
"""{"messages": [...]} for the chat template, or {"prompt": text} to continue as it is."""


class DebianPrompts:
    """Draws prompts; the same ones for the same seed and the same packages."""

    def __init__(self, wordnet: Path, python_docs: Path, library: Path, dump: str, seed: int) -> None:
        """Read the items.

        Args:
            wordnet: the folder of WordNet's database (package wordnet-base).
            python_docs: the folder of reStructuredText of package python3.11-doc.
            library: Python's standard library.
            dump: what `apt-cache dumpavail` prints.
            seed: of the draw.
        """
        self._random = random.Random(seed)
        self._nouns = words(wordnet, "noun")
        self._verbs = words(wordnet, "verb")
        self._functions = list(functions(library))
        self._paragraphs = list(paragraphs(python_docs))
        self._packages = list(descriptions(dump))

    def __iter__(self) -> Iterator[Prompt]:
        """Without end."""
        makers: list[tuple[Callable[[], str], int]] = [
            (self._noun, 34),
            (self._verb, 12),
            (self._gloss, 6),
            (self._paragraph, 8),
            (self._package, 6),
            (self._function, 14),
            (self._task, 12),
            (self._sum, 3),
            (lambda: self._random.choice(templates.GREETINGS), 1),
        ]
        kinds, weights = zip(*makers, strict=True)
        while True:
            if self._random.random() < 0.08:
                yield {"prompt": self._start_of_text()}
                continue
            text = self._random.choices(kinds, weights)[0]()
            messages = [{"role": "user", "content": text}]
            if self._random.random() < 0.15:
                messages.insert(0, {"role": "system", "content": self._random.choice(templates.SYSTEM)})
            yield {"messages": messages}

    def _noun(self) -> str:
        a, b = (self._article(word.text) for word in self._random.sample(self._nouns, 2))
        return self._random.choice(templates.NOUN).format(a=a, b=b)

    def _article(self, noun: str) -> str:
        choice = self._random.random()
        if choice < 0.3:
            return ("an " if noun[0] in "aeiou" else "a ") + noun
        return f"the {noun}" if choice < 0.35 else noun

    def _verb(self) -> str:
        verb, noun = self._random.choice(self._verbs).text, self._random.choice(self._nouns).text
        if self._random.random() < 0.5:
            verb = f"{verb} {self._article(noun)}"
        return self._random.choice(templates.VERB).format(a=verb)

    def _gloss(self) -> str:
        word: Word = self._random.choice(self._nouns)
        return self._random.choice(templates.GLOSS).format(a=word.text, text=word.gloss)

    def _paragraph(self) -> str:
        return self._random.choice(templates.PARAGRAPH).format(text=self._random.choice(self._paragraphs))

    def _package(self) -> str:
        name, text = self._random.choice(self._packages)
        return self._random.choice(templates.PACKAGE).format(a=name, text=text)

    def _function(self) -> str:
        function: Function = self._random.choice(self._functions)
        template = self._random.choice(templates.FUNCTION)
        return template.format(a=function.name, b=function.module, code=function.signature, text=function.summary)

    def _task(self) -> str:
        verb = self._random.choice(templates.TASK_VERBS)
        thing, argument, example = self._random.choice(templates.TASK_THINGS)
        name = f"{verb.removesuffix('s')}_{thing.split()[-1].lower().strip('.')}"
        upper = verb.removesuffix("s").capitalize()
        template = self._random.choice(templates.TASK)
        return template.format(verb=verb, thing=thing, name=name, argument=argument, example=example, upper=upper)

    def _sum(self) -> str:
        n, a = self._random.randint(2, 20), self._random.choice(self._nouns).text
        template = self._random.choice(templates.SUM)
        return template.format(n=n, m=n * self._random.randint(2, 20), a=a)

    def _start_of_text(self) -> str:
        """The start of a function or a text, for servers that complete without a chat template."""
        if self._random.random() < 0.5:
            function: Function = self._random.choice(self._functions)
            return f'{function.signature}\n    """{function.summary}"""\n'
        text = self._random.choice(self._paragraphs)
        return text[: self._random.randint(40, 150)].rsplit(" ", 1)[0]
