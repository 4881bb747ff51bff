"""The recipe for heads, on a target whose rule is known: a head that learns it must be accepted by the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.progress import Progress

from server.config import Settings
from server.errors import UserError
from tests.spec.engine_harness import make_engine
from tests.spec.table_models import table, write_table_target
from tests.spec.tiny_models import write_llama
from tools.train_draft.answers import read_answers
from tools.train_draft.batches import Batches
from tools.train_draft.capture import capture_in_memory, capture_to_folder
from tools.train_draft.commands import parse
from tools.train_draft.gated_mlp import MixtureOfExperts
from tools.train_draft.hidden import HiddenStates
from tools.train_draft.own_prompts import plain

RULE = table(0)


@pytest.fixture(autouse=True)
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes longer than the training here."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")


def run(*arguments: str | Path) -> None:
    command = parse([str(argument) for argument in arguments])
    with Progress(disable=True) as bar:
        command(bar)


def write_answers(file: Path, count: int = 64, length: int = 24) -> Path:
    """What the table target says, which is known without an engine."""
    lines = []
    for first in range(count):
        prompt = [first % 64]
        lines.append(json.dumps({"prompt": prompt, "answer": RULE.continued(prompt, length)}))
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.mark.parametrize(
    ("method", "flags"),
    [("eagle3", ()), ("mtp", ("--experts", "2", "--top-k", "1", "--expert-width", "32", "--shared", "1"))],
    ids=["eagle3", "mtp"],
)
def test_a_head_learns_its_target(tmp_path: Path, method: str, flags: tuple[str, ...]) -> None:
    target = write_table_target(tmp_path / "target", RULE)
    answers = write_answers(tmp_path / "answers.jsonl")
    common = ("train", "--model", target, "--dtype", "float32", "--device", "cpu", "--method", method, *flags)
    common += ("--answers", answers, "--boundaries", "1", "2", "3", "--out", tmp_path / "run", "--tokens", "512")
    run(*common, "--learning-rate", "5e-3", "--single", "0.3", "--epochs", "60")
    curve = [json.loads(line) for line in (tmp_path / "run" / "curve.jsonl").read_text().splitlines()]
    assert min(curve[-1]["acceptance"]) > 0.9
    draft = {"method": method, "model": tmp_path / "run" / "checkpoint", "num_speculative_tokens": 3}
    engine = make_engine(target, draft, max_model_len=256)
    answer = engine.generate([[5], [40]], max_tokens=24)
    assert answer == [RULE.continued([5], 24), RULE.continued([40], 24)]
    counts = engine.counts()
    assert sum(counts.accepted) > 0.9 * sum(counts.drafted)
    # A second start goes on from the state: nothing is left to do, and nothing is lost.
    run(*common, "--learning-rate", "5e-3", "--single", "0.3", "--epochs", "60")
    again = [json.loads(line) for line in (tmp_path / "run" / "curve.jsonl").read_text().splitlines()]
    assert again[-1]["steps"] == curve[-1]["steps"]
    about = (tmp_path / "run" / "about.json").read_text()
    other = {"eagle3": "mtp", "mtp": "eagle3"}[method]
    with pytest.raises(UserError, match=f"holds a training with --method {method}; name another folder"):
        run("train", "--model", target, "--method", other, "--answers", answers, "--out", tmp_path / "run")
    assert (tmp_path / "run" / "about.json").read_text() == about


def test_prompts_are_no_answers(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "Hello"}]}\n')
    with pytest.raises(UserError, match="holds no answers"):
        list(read_answers([file]))


def test_hidden_states_in_memory_are_those_on_disk(tmp_path: Path) -> None:
    target = write_table_target(tmp_path / "target", RULE)
    settings = Settings.model_validate({"model": str(target), "dtype": "float32", "device": "cpu"})
    files = [write_answers(tmp_path / "a.jsonl", 3), write_answers(tmp_path / "b.jsonl", 5, 9)]
    with Progress(disable=True) as bar:
        memory = capture_in_memory(settings, files, (1, 3), bar)
        capture_to_folder(settings, files[:1], tmp_path / "hidden", (1, 3), bar)
        # A cut last line, as an interruption leaves it, and more answers since.
        with (tmp_path / "hidden" / "sequences.jsonl").open("a") as file:
            file.write('{"start": 75, "len')
        (tmp_path / "hidden" / "sequences.jsonl").write_text(
            "\n".join((tmp_path / "hidden" / "sequences.jsonl").read_text().splitlines()[:3]) + "\n"
        )
        capture_to_folder(settings, files, tmp_path / "hidden", (1, 3), bar)
    disk = HiddenStates.open(tmp_path / "hidden")
    assert disk.sequences == memory.sequences
    assert len(disk.sequences) == 8
    assert torch.equal(disk.tokens, memory.tokens)
    torch.testing.assert_close(disk.hidden, memory.hidden)
    batches = Batches([disk], memory.hidden.shape[1] // 3, 64, 0, torch.device("cpu"))
    seen = [place for epoch in (batches.epoch(0), [batches.held_out]) for batch in epoch for _, place in batch]
    assert sorted(seen, key=lambda place: place.start) == disk.sequences


def test_many_short_answers_and_a_long_one_fit_into_the_cache(tmp_path: Path) -> None:
    target = write_table_target(tmp_path / "target", RULE)
    settings = Settings.model_validate({"model": str(target), "dtype": "float32", "device": "cpu"})
    short = write_answers(tmp_path / "short.jsonl", 64, 3)
    many = tmp_path / "many.jsonl"
    many.write_text(short.read_text() * 20)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": [1], "answer": RULE.continued([1], 900)}) + "\n")
    with Progress(disable=True) as bar:
        alone = capture_in_memory(settings, [short], (3,), bar)
        made = capture_in_memory(settings, [many, long], (3,), bar)
    torch.testing.assert_close(made.hidden[-901 - len(alone.hidden) : -901], alone.hidden)
    assert len(made.hidden) == 20 * len(alone.hidden) + 901


def test_the_target_makes_up_prompts_and_answers_them(tmp_path: Path) -> None:
    target = write_llama(tmp_path / "target")
    own, answers, without = (tmp_path / name for name in ("own.jsonl", "answers.jsonl", "without.jsonl"))
    model = ("--model", target, "--device", "cpu", "--batch", "8")
    run("ask", *model, "--count", "6", "--out", own, "--seed", "3")
    first = own.read_text().splitlines()
    without.write_text(first[0] + "\n")
    # Interrupted and started again; what is there stays, and no prompt comes twice.
    run("ask", *model, "--count", "9", "--out", own, "--seed", "3")
    lines = own.read_text().splitlines()
    assert lines[:6] == first
    assert len({plain(line) for line in lines}) == 9
    other = tmp_path / "other.jsonl"
    run("ask", *model, "--count", "6", "--out", other, "--seed", "3", "--without", without)
    assert plain(first[0]) not in {plain(line) for line in other.read_text().splitlines()}
    for shard in ("0/2", "1/2"):
        run("answer", *model, "--prompts", own, other, "--out", answers, "--max-tokens", "5", "--shard", shard)
    made = list(read_answers([answers]))
    assert made
    assert all(answer.prompt and len(answer.answer) <= 5 for answer in made)


def test_a_mixture_in_training_is_the_plain_sum_of_its_experts() -> None:
    torch.manual_seed(0)
    mixture = MixtureOfExperts(32, 16, 8, 2, 1)
    x = torch.randn(3, 20, 32)
    with torch.no_grad():
        mixture.gate.e_score_correction_bias.normal_()
        rows = []
        for row in x.flatten(0, 1):
            scores = (mixture.gate.weight @ row).sigmoid()
            chosen = (scores + mixture.gate.e_score_correction_bias).topk(2).indices.tolist()
            total = sum(scores[i] for i in chosen)
            parts = [scores[i] / total * mixture.experts[i](row) for i in chosen]
            rows.append(mixture.shared_experts(row) + sum(parts))
        torch.testing.assert_close(mixture(x), torch.stack(rows).view(x.shape), atol=1e-5, rtol=1e-4)
    assert mixture.gate.load.sum() == 120
