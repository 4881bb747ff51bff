"""Prompts that the target itself makes up: given the chat template up to the user's turn, it goes on.

Magpie (arXiv 2406.08464). They are as varied as what the target was taught to answer, and no one else's text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import load_tokenizer
from server.config import Settings
from server.engine.in_process import InProcessEngine
from tools.train_draft.prompts import render

_MARK = "\N{SNOWMAN}"
_SHORTEST, _LONGEST = 3, 96
"""Tokens of a prompt; one that has not ended by then is left out."""


def write_own_prompts(
    settings: Settings, count: int, out: Path, seed: int, without: Sequence[Path], progress: Progress
) -> None:
    """Let the target make up prompts and append them to `out` until `count` are there, none of them twice.

    Args:
        settings: of the engine.
        count: of lines.
        out: JSON Lines for `write_answers`.
        seed: of the draw; processes that share the work have different ones.
        without: files of prompts that must not occur, for instance those that a report will use.
        progress: shows prompts.
    """
    tokenizer = load_tokenizer(locate(settings.model), settings.tokenizer)
    whole = render(tokenizer, [[{"role": "user", "content": _MARK}]])[0]
    before = tokenizer.tokenizer.encode(whole[: whole.index(_MARK)], add_special_tokens=False).ids
    engine = InProcessEngine(settings)
    seen = {plain(line) for file in without for line in file.read_text(encoding="utf-8").splitlines()}
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    seen |= {plain(line) for line in lines}
    made = asked = len(lines)
    task = progress.add_task("asking", total=count, completed=made)
    with out.open("a", encoding="utf-8") as file:
        while made < count:
            answers = engine.generate(
                [before] * (4 * settings.max_num_seqs),
                _LONGEST,
                stop_token_ids=tokenizer.eos_token_ids,
                temperature=1.0,
                top_p=0.95,
                first_seed=(seed << 32) + asked,
            )
            asked += len(answers.token_ids)
            for ids in answers.token_ids:
                text = tokenizer.tokenizer.decode(ids).strip()
                line = json.dumps({"messages": [{"role": "user", "content": text}]})
                if _SHORTEST <= len(ids) < _LONGEST and made < count and plain(line) not in seen:
                    seen.add(plain(line))
                    file.write(line + "\n")
                    made += 1
            file.flush()
            progress.update(task, completed=made)


def plain(line: str) -> str:
    """A line of prompts as it is compared: without case, signs and layout."""
    return re.sub(r"[\W_]+", " ", line.lower())
