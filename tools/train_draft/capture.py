"""Computes the target's hidden states over its own answers with this server's engine, by teacher forcing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.progress import Progress
from torch import Tensor

from server.config import Settings
from server.engine.batch import Span
from server.engine.plan import EnginePlan, make_plan
from server.engine.runner import build_target
from tools.train_draft.answers import Answer, read_answers
from tools.train_draft.hidden import HiddenStates, Place, whole_lines

_TOKENS_A_STEP = {"cpu": 4096, "cuda": 32768}
_SHORTEST = 3
"""Tokens of an answer that says anything about drafts."""


@dataclass(frozen=True)
class _Computed:
    """What one step of the target made of some sequences."""

    sequences: list[Place]
    tokens: Tensor
    """int64 [T]."""
    hidden: Tensor
    """bf16 [T, (n + 1) * H]."""


def capture_in_memory(
    settings: Settings, answers: Sequence[Path], boundaries: Sequence[int], bar: Progress
) -> HiddenStates:
    """Hidden states of all answers, on the device that the settings name: about 2 * (n + 1) * H bytes a token."""
    todo = _worth(read_answers(answers))
    total = sum(len(answer.prompt) + len(answer.answer) for answer in todo)
    task = bar.add_task("hidden states", total=len(todo))
    target = (plan := make_plan(settings)).target
    tokens = torch.empty(total, dtype=torch.int32, device=target.device)
    hidden = torch.empty(total, _columns(plan, boundaries), dtype=torch.bfloat16, device=target.device)
    sequences: list[Place] = []
    for made in _compute(plan, todo, boundaries, 0):
        begin = made.sequences[0].start
        end = begin + len(made.tokens)
        tokens[begin:end], hidden[begin:end] = made.tokens, made.hidden
        sequences += made.sequences
        bar.advance(task, len(made.sequences))
    return HiddenStates(sequences, tokens, hidden, tuple(boundaries))


def capture_to_folder(
    settings: Settings, answers: Sequence[Path], folder: Path, boundaries: Sequence[int], bar: Progress
) -> None:
    """Append the hidden states of answers that are not there yet.

    Args:
        settings: of the engine: model, dtype and so on.
        answers: what `write_answers` wrote.
        folder: made if it is not there; `HiddenStates.open` reads it.
        boundaries: layer boundaries to capture, rising: i is the input of layer i, N what the last layer leaves.
        bar: shows sequences.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(settings)
    columns = _columns(plan, boundaries)
    (folder / "about.json").write_text(json.dumps({"width": columns, "boundaries": list(boundaries)}))
    done = [Place(**json.loads(line)) for line in whole_lines(folder / "sequences.jsonl")]
    at = done[-1].start + done[-1].length if done else 0
    todo = _worth(read_answers(answers))[len(done) :]
    task = bar.add_task("hidden states", total=len(done) + len(todo), completed=len(done))
    with (
        (folder / "tokens.bin").open("r+b" if at else "wb") as tokens,
        (folder / "hidden.bin").open("r+b" if at else "wb") as hidden,
        (folder / "sequences.jsonl").open("a") as index,
    ):
        tokens.truncate(at * 4), hidden.truncate(at * columns * 2)
        tokens.seek(at * 4), hidden.seek(at * columns * 2)
        for made in _compute(plan, todo, boundaries, at):
            hidden.write(made.hidden.cpu().view(torch.int16).numpy().tobytes())
            tokens.write(made.tokens.cpu().int().numpy().tobytes())
            index.writelines(json.dumps(asdict(place)) + "\n" for place in made.sequences)
            for file in (tokens, hidden, index):
                file.flush()
            bar.advance(task, len(made.sequences))


def _worth(answers: Iterator[Answer]) -> list[Answer]:
    return [answer for answer in answers if len(answer.answer) >= _SHORTEST]


def _columns(plan: EnginePlan, boundaries: Sequence[int]) -> int:
    return (len(boundaries) + 1) * plan.target.layers.hidden_size


def _compute(plan: EnginePlan, answers: Sequence[Answer], boundaries: Sequence[int], at: int) -> Iterator[_Computed]:
    """Run the target over prompts with their answers, the first of which begins at `at`."""
    runner = build_target(plan.target, plan.pages("target"), boundaries, lambda done, total: None)
    room, size = _TOKENS_A_STEP[plan.target.device.type], runner.pages.block_size
    longest = max((len(answer.prompt) + len(answer.answer) for answer in answers), default=0)
    blocks = max(room // size, -(-longest // size))
    runner.allocate(blocks + 1)
    for group in _groups(answers, blocks, size):
        spans, places, block = [], [], 1
        for answer in group:
            ids = answer.prompt + answer.answer
            needed = -(-len(ids) // size)
            spans.append(Span(list(range(block, block + needed)), 0, ids))
            places.append(Place(at, len(ids), len(answer.prompt)))
            block, at = block + needed, at + len(ids)
        batch = runner.batch(spans)
        with torch.inference_mode():
            made = runner.model(batch.input_ids, batch.positions, runner.attention.plan(batch.step))
            states = torch.cat([made.final] if made.aux is None else [made.aux, made.final], 1).bfloat16()
        yield _Computed(places, batch.input_ids, states)


def _groups(answers: Sequence[Answer], blocks: int, size: int) -> Iterator[list[Answer]]:
    """Consecutive answers that fit into so many blocks of so many tokens."""
    group: list[Answer] = []
    used = 0
    for answer in answers:
        needed = -(-(len(answer.prompt) + len(answer.answer)) // size)
        if used + needed > blocks:
            yield group
            group, used = [], 0
        group.append(answer)
        used += needed
    if group:
        yield group
