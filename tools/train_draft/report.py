"""Acceptance by position on prompts that were not trained on, as this server's engine counts it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.progress import Progress

from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import load_tokenizer
from server.config import Settings
from server.engine.in_process import InProcessEngine
from tools.train_draft.prompts import read_prompts


def report(settings: Settings, prompts: Path, max_tokens: int, progress: Progress) -> None:
    """Answer greedily and print one JSON object.

    Args:
        settings: of the engine, with its draft.
        prompts: see `read_prompts`.
        max_tokens: of one answer.
        progress: shows prompts.
    """
    tokenizer = load_tokenizer(locate(settings.model), settings.tokenizer)
    ids = read_prompts(prompts, tokenizer)
    engine = InProcessEngine(settings)
    task = progress.add_task("drafting", total=len(ids))
    size, seconds, tokens = settings.max_num_seqs, 0.0, 0
    for first in range(0, len(ids), size):
        batch = ids[first : first + size]
        made = engine.generate(batch, max_tokens, stop_token_ids=tokenizer.eos_token_ids)
        seconds += made.seconds
        tokens += sum(map(len, made.token_ids))
        progress.advance(task, len(batch))
    counts = engine.stats.drafts
    drafts = sum(counts.lengths)
    found = {
        "prompts": len(ids),
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "drafts": drafts,
        "drafted": list(counts.drafted),
        "accepted": list(counts.accepted),
        "acceptance": [round(a / max(1, d), 4) for a, d in zip(counts.accepted, counts.drafted, strict=True)],
        "length": round(1 + sum(counts.accepted) / max(1, drafts), 3),
    }
    sys.stdout.write(json.dumps(found) + "\n")
