"""The target's own answers, by this server's engine: what a draft has to foresee."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from server.checkpoint.locate import locate
from server.checkpoint.tokenizer import load_tokenizer
from server.config import Settings
from server.engine.in_process import InProcessEngine
from server.errors import UserError
from tools.train_draft.prompts import read_prompts

SAMPLED_CHUNKS = 4
"""Every so many chunks one is sampled, at temperature 0.7; the others are greedy."""


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target said."""

    prompt: list[int]
    answer: list[int]


def read_answers(files: Sequence[Path]) -> Iterator[Answer]:
    """Answers of finished chunks, in the files' order. A last line that was cut short is left out."""
    for file in files:
        for line in file.read_text().splitlines():
            if line.endswith("}"):
                entry = json.loads(line)
                if not isinstance(entry.get("prompt"), list) or not isinstance(entry.get("answer"), list):
                    raise UserError(f"{file}: holds no answers, which `answer` makes of prompts")
                yield Answer(entry["prompt"], entry["answer"])


def write_answers(
    settings: Settings, prompts: Sequence[Path], out: Path, max_tokens: int, shard: tuple[int, int], progress: Progress
) -> None:
    """Answer prompts and append them to `out`; lines that are there already are not made again.

    Args:
        settings: of the engine: model, dtype, `max_num_seqs` and so on.
        prompts: see `read_prompts`.
        out: JSON Lines.
        max_tokens: of one answer.
        shard: (i, n) takes every n-th prompt from the i-th on: n processes of one thread each outdo one of n threads.
        progress: shows tokens.
    """
    tokenizer = load_tokenizer(locate(settings.model), settings.tokenizer)
    engine = InProcessEngine(settings)
    longest = engine.plan.max_model_len - max_tokens
    every = [prompt for file in prompts for prompt in read_prompts(file, tokenizer, shard)]
    ids = [prompt for prompt in every if len(prompt) <= longest]
    done = out.read_bytes().count(b"}\n") if out.exists() else 0
    size = 4 * settings.max_num_seqs
    bar = progress.add_task("answering", total=len(ids), completed=done)
    with out.open("a") as file:
        for chunk in range(done // size, -(-len(ids) // size)):
            batch = ids[max(done, chunk * size) : (chunk + 1) * size]
            sampled = chunk % SAMPLED_CHUNKS == SAMPLED_CHUNKS - 1
            made = engine.generate(
                batch,
                max_tokens,
                stop_token_ids=tokenizer.eos_token_ids,
                temperature=0.7 if sampled else 0.0,
                first_seed=chunk * size,
            )
            for prompt, answer in zip(batch, made.token_ids, strict=True):
                file.write(json.dumps({"prompt": prompt, "answer": answer}) + "\n")
            file.flush()
            progress.advance(bar, len(batch))
