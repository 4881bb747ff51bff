"""Hidden states of the target over its own answers, computed by this server's engine and kept on disk in bf16.

A folder of `tokens.bin` (int32, all sequences behind each other), `hidden.bin` (bf16 [tokens, (n + 1) * H]: the n
captured boundaries, then the final hidden state after the norm), and `sequences.jsonl` (start, length and the prompt's
length of each). Sequences are appended: a run that was interrupted goes on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from server.config import Settings
from server.engine.batch import Span
from server.engine.plan import make_plan
from server.engine.runner import build_target
from tools.train_draft.answers import Answer, read_answers

_TOKENS_A_STEP = 4096


@dataclass(frozen=True)
class Place:
    """One prompt with its answer, by its place in the folder's files."""

    start: int
    length: int
    prompt: int
    """Tokens of the prompt."""


@dataclass(frozen=True)
class HiddenFolder:
    """Reads what `capture` wrote, by memory mapping."""

    sequences: list[Place]
    tokens: np.ndarray
    hidden: Tensor
    """bf16 [tokens, (n + 1) * H]."""
    boundaries: tuple[int, ...]

    @classmethod
    def open(cls, folders: Sequence[Path]) -> list[HiddenFolder]:
        """Open several."""
        return [cls._open(folder) for folder in folders]

    @classmethod
    def _open(cls, folder: Path) -> HiddenFolder:
        about = json.loads((folder / "about.json").read_text())
        sequences = [Place(**json.loads(line)) for line in _lines(folder / "sequences.jsonl")]
        total = sequences[-1].start + sequences[-1].length
        tokens = np.memmap(folder / "tokens.bin", np.int32, "r", shape=(total,))
        file = str(folder / "hidden.bin")
        flat = torch.from_file(file, shared=True, size=total * about["width"], dtype=torch.bfloat16)
        return cls(sequences, tokens, flat.view(total, about["width"]), tuple(about["boundaries"]))


def _lines(file: Path) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []


def capture(
    settings: Settings, answers: Sequence[Path], folder: Path, boundaries: Sequence[int], bar: Progress
) -> None:
    """Run the target over prompts with their answers and append the hidden states of those not there yet.

    Args:
        settings: of the engine: model, dtype and so on.
        answers: what `write_answers` wrote.
        folder: made if it is not there.
        boundaries: layer boundaries to capture, rising: i is the input of layer i, N what the last layer leaves.
        bar: shows sequences.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(settings)
    runner = build_target(plan.target, plan.pages("target"), boundaries, lambda done, total: None)
    width = (len(boundaries) + 1) * plan.target.layers.hidden_size
    (folder / "about.json").write_text(json.dumps({"width": width, "boundaries": list(boundaries)}))
    done = [Place(**json.loads(line)) for line in _lines(folder / "sequences.jsonl")]
    at = done[-1].start + done[-1].length if done else 0
    todo = [answer for answer in read_answers(answers) if len(answer.answer) > 2][len(done) :]
    size = runner.pages.block_size
    runner.allocate(2 * _TOKENS_A_STEP // size + 1)
    task = bar.add_task("hidden states", total=len(done) + len(todo), completed=len(done))
    with (
        (folder / "tokens.bin").open("r+b" if at else "wb") as tokens,
        (folder / "hidden.bin").open("r+b" if at else "wb") as hidden,
        (folder / "sequences.jsonl").open("a") as index,
        torch.inference_mode(),
    ):
        tokens.truncate(at * 4), hidden.truncate(at * width * 2)
        tokens.seek(at * 4), hidden.seek(at * width * 2)
        for group in _groups(todo):
            spans, block = [], 1
            for answer in group:
                ids = answer.prompt + answer.answer
                needed = -(-len(ids) // size)
                spans.append(Span(list(range(block, block + needed)), 0, ids))
                block += needed
            batch = runner.batch(spans)
            made = runner.model(batch.input_ids, batch.positions, runner.attention.plan(batch.step))
            states = [made.final] if made.aux is None else [made.aux, made.final]
            hidden.write(torch.cat(states, 1).bfloat16().view(torch.int16).numpy().tobytes())
            tokens.write(batch.input_ids.int().numpy().tobytes())
            for answer, span in zip(group, spans, strict=True):
                entry = {"start": at, "length": len(span.token_ids), "prompt": len(answer.prompt)}
                index.write(json.dumps(entry) + "\n")
                at += len(span.token_ids)
            for file in (tokens, hidden, index):
                file.flush()
            bar.advance(task, len(group))


def _groups(answers: Sequence[Answer]) -> list[list[Answer]]:
    groups: list[list[Answer]] = []
    room = 0
    for answer in answers:
        length = len(answer.prompt) + len(answer.answer)
        if length > room:
            groups.append([])
            room = _TOKENS_A_STEP
        groups[-1].append(answer)
        room -= length
    return groups
