"""The prompts for training are varied, drawn alike each time, and none of those that heads are judged by."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from tools.train_draft.chat_prompts import ChatPrompts

HELD_OUT = Path(__file__).parents[2] / "tools" / "train_draft" / "held_out.jsonl"


def drawn(count: int, seed: int = 7) -> list[str]:
    prompts = itertools.islice(ChatPrompts(["owl", "bridge", "idea"], seed), count)
    return [prompt["messages"][-1]["content"] for prompt in prompts]


def plain(text: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", text.lower()).strip()


def test_the_same_seed_draws_the_same() -> None:
    assert drawn(50) == drawn(50) != drawn(50, seed=8)


def test_frames_are_filled_and_few_prompts_repeat() -> None:
    texts = drawn(5000)
    assert not [text for text in texts if "{" in text or "}" in text]
    assert len(set(texts)) > 4000


def test_no_prompt_is_one_that_heads_are_judged_by() -> None:
    lines = HELD_OUT.read_text().splitlines()
    held_out = {plain(json.loads(line)["messages"][-1]["content"]) for line in lines}
    assert len(held_out) == 100
    assert not held_out & {plain(text) for text in drawn(24_000)}
