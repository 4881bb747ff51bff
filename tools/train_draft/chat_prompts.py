"""Prompts such as people type to a chat model: frames over everyday subjects and words, worded in many ways."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Prompt = dict[str, Any]
"""{"messages": [...]} for the chat template."""


KINDS = (
    # Weight, frames, what fills {x} and {y}.
    (22, "subject", "subjects"),
    (8, "subject", "nouns"),
    (6, "place", "places"),
    (5, "person", "people"),
    (13, "skill", "skills"),
    (9, "story", "characters"),
    (6, "letter", "recipients"),
    (3, "product", "products"),
    (4, "job", "occupations"),
    (4, "feeling", "feelings"),
    (3, "word", "words"),
    (4, "sentence", "sentences"),
    (8, "code", "code_does"),
    (4, "programming", "concepts"),
    (4, "maths", "nouns"),
    (5, "lists", "listed"),
    (1, "openers", "nouns"),
)


def read_lists(file: Path) -> dict[str, list[str]]:
    """Lines under `[name]`, by name; a backslash and n in a line is a line break."""
    lists: dict[str, list[str]] = {}
    name = ""
    for line in file.read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            name = heading[1]
            lists[name] = []
        elif line:
            lists[name].append(line.replace("\\n", "\n"))
    return lists


class ChatPrompts:
    """Draws prompts without end; the same ones for the same seed and nouns."""

    def __init__(self, nouns: Sequence[str], seed: int) -> None:
        """Read the lists beside this file.

        Args:
            nouns: to ask about besides the written subjects, for instance WordNet's.
            seed: of the draw.
        """
        here = Path(__file__).parent
        self._random = random.Random(seed)
        self._frames = read_lists(here / "chat_frames.txt")
        self._topics: dict[str, Sequence[str]] = {**read_lists(here / "chat_topics.txt"), "nouns": nouns}

    def __iter__(self) -> Iterator[Prompt]:
        """Without end."""
        weights = [weight for weight, _, _ in KINDS]
        while True:
            _, frame, topic = self._random.choices(KINDS, weights)[0]
            messages = [{"role": "user", "content": self._worded(self._fill(frame, topic))}]
            if self._random.random() < 0.1:
                messages.insert(0, {"role": "system", "content": self._random.choice(self._frames["system"])})
            yield {"messages": messages}

    def _fill(self, frame: str, topic: str) -> str:
        pick = self._random.choice
        n = self._random.randint(2, 12)
        filled = pick(self._frames[frame]).format(
            x=pick(self._topics[topic]),
            y=pick(self._topics[topic]),
            s=pick(self._topics["settings"]),
            r=pick(self._topics["recipients"]),
            p=pick(self._topics["purposes"]),
            lang=pick(self._topics["languages"]),
            text=pick(self._topics["sentences"]),
            n=n,
            m=n * self._random.randint(1, 15) + pick((0, 0, 1, 3)),
        )
        return filled[0].upper() + filled[1:]

    def _worded(self, text: str) -> str:
        """With what people put before and after, or as they type in haste."""
        chance = self._random.random()
        if chance < 0.12:
            before = self._random.choice(self._frames["before"])
            return before + " " + (text if before[-1] in ".!?:" else text[0].lower() + text[1:])
        if chance < 0.32 and text[-1] in ".?!":
            return f"{text} {self._random.choice(self._frames['after'])}"
        if chance < 0.40:
            return text.lower().rstrip(".?!")
        return text
