"""The commands and their flags."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from server.checkpoint.locate import locate
from server.config import Settings
from server.engine.models.config import ModelConfig
from server.engine.plan import make_plan
from server.errors import UserError
from tools.train_draft.answers import write_answers
from tools.train_draft.batches import Batches
from tools.train_draft.capture import capture_in_memory, capture_to_folder
from tools.train_draft.eagle3_head import Eagle3Head
from tools.train_draft.hidden import HiddenStates
from tools.train_draft.mtp_head import FeedForward, MTPHead
from tools.train_draft.own_prompts import write_own_prompts
from tools.train_draft.target_weights import TargetWeights
from tools.train_draft.train import Recipe, Training
from tools.train_draft.unroll import Head, TargetEnds
from tools.train_draft.vocab import frequent_tokens

Command = Callable[[Progress], None]


def parse(arguments: Sequence[str]) -> Command:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.train_draft", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--model", help="the target: a folder, a .gguf file or a hub id (the embedded model)")
    model.add_argument("--dtype", default="auto", help="of the target (auto)")
    model.add_argument("--device", default="auto", help="cpu or cuda (auto: a GPU where there is one)")
    model.add_argument("--memory", type=float, help="share of a GPU's memory that an engine takes")

    answer = commands.add_parser("answer", parents=[model], help="answer prompts with the target")
    answer.add_argument("--prompts", type=Path, nargs="+", required=True, help="JSON Lines")
    answer.add_argument("--out", type=Path, required=True, help="JSON Lines; an interrupted run goes on")
    answer.add_argument("--max-tokens", type=int, default=256, help="of one answer (256)")
    answer.add_argument("--batch", type=int, default=64, help="answers at a time (64)")
    answer.add_argument("--shard", default="0/1", metavar="I/N", help="every N-th prompt from the I-th on (0/1)")

    ask = commands.add_parser("ask", parents=[model], help="let the target make up prompts")
    ask.add_argument("--count", type=int, required=True, help="prompts")
    ask.add_argument("--out", type=Path, required=True, help="JSON Lines; an interrupted run goes on")
    ask.add_argument("--without", type=Path, nargs="+", default=[], help="files of prompts that must not occur")
    ask.add_argument("--batch", type=int, default=64, help="prompts at a time (64)")
    ask.add_argument("--seed", type=int, default=0, help="of the draw: another for each process (0)")

    hidden = commands.add_parser("hidden", parents=[model], help="compute the target's hidden states")
    hidden.add_argument("--answers", type=Path, nargs="+", required=True)
    hidden.add_argument("--out", type=Path, required=True, help="a folder; an interrupted run goes on")
    hidden.add_argument("--boundaries", type=int, nargs="+", help="layer boundaries for EAGLE-3 (N/3, 2N/3, N)")

    train = commands.add_parser("train", parents=[model], help="train a head")
    train.add_argument("--method", choices=("eagle3", "mtp"), required=True)
    source = train.add_mutually_exclusive_group(required=True)
    source.add_argument("--hidden", type=Path, nargs="+", help="folders that `hidden` wrote")
    source.add_argument(
        "--answers", type=Path, nargs="+", help="files that `answer` wrote: hidden states are kept in memory"
    )
    train.add_argument("--boundaries", type=int, nargs="+", help="with --answers: as for `hidden`")
    train.add_argument("--out", type=Path, required=True, help="a folder; an interrupted run goes on")
    train.add_argument("--draft-vocab", type=int, default=8192, help="tokens that the head scores (8192)")
    train.add_argument("--steps", type=int, default=3, help="drafts that it is unrolled for (3)")
    train.add_argument("--single", type=float, default=0.6, help="share of the budget for the first draft alone (0.6)")
    train.add_argument("--epochs", type=int, default=10)
    train.add_argument("--minutes", type=float, help="end after so long, whatever --epochs says")
    train.add_argument("--tokens", type=int, default=4096, help="of a batch (4096)")
    train.add_argument("--learning-rate", type=float, default=6e-4)
    train.add_argument("--experts", type=int, help="mtp: experts of the layer, 0 for none (the target's)")
    train.add_argument("--top-k", type=int, help="mtp: experts a token goes to (the target's)")
    train.add_argument("--expert-width", type=int, help="mtp: of an expert, or of the plain feed-forward part")
    train.add_argument("--shared", type=int, help="mtp: width of the shared expert, in experts (the target's)")
    train.add_argument("--seed", type=int, default=0)

    report = commands.add_parser("report", parents=[model], help="acceptance on prompts, by this server's engine")
    report.add_argument("--prompts", type=Path, required=True, help="JSON Lines, none of them trained on")
    report.add_argument("--speculative-config", required=True, help="as for `outrider serve`")
    report.add_argument("--max-tokens", type=int, default=128, help="of one answer (128)")
    report.add_argument("--batch", type=int, default=16)
    asked = parser.parse_args(arguments)
    return {"ask": _ask, "answer": _answer, "hidden": _hidden, "train": _train, "report": _report}[asked.command](asked)


def _settings(asked: argparse.Namespace, **more: Any) -> Settings:
    named = {"model": asked.model, "dtype": asked.dtype, "device": asked.device}
    return Settings.model_validate(named | {"gpu_memory_utilization": asked.memory} | more)


def _ask(asked: argparse.Namespace) -> Command:
    settings = _settings(asked, max_num_seqs=asked.batch)
    return lambda bar: write_own_prompts(settings, asked.count, asked.out, asked.seed, asked.without, bar)


def _answer(asked: argparse.Namespace) -> Command:
    index, _, count = asked.shard.partition("/")
    settings = _settings(asked, max_num_seqs=asked.batch)
    shard = (int(index), int(count))
    return lambda bar: write_answers(settings, asked.prompts, asked.out, asked.max_tokens, shard, bar)


def _hidden(asked: argparse.Namespace) -> Command:
    boundaries = _boundaries(asked)
    return lambda bar: capture_to_folder(_settings(asked), asked.answers, asked.out, boundaries, bar)


def _boundaries(asked: argparse.Namespace) -> list[int]:
    layers = ModelConfig.from_hf(locate(asked.model).config).num_layers
    return sorted(asked.boundaries or (layers // 3, layers * 2 // 3, layers))


def _train(asked: argparse.Namespace) -> Command:
    return lambda bar: _run_training(asked, bar)


def _run_training(asked: argparse.Namespace, bar: Progress) -> None:
    torch.manual_seed(asked.seed)
    _check_begun(asked)
    checkpoint = locate(asked.model)
    weights = TargetWeights(checkpoint)
    target = ModelConfig.from_hf(checkpoint.config)
    device = make_plan(_settings(asked)).target.device
    if asked.answers:
        states = [capture_in_memory(_settings(asked), asked.answers, _boundaries(asked), bar)]
    else:
        states = [HiddenStates.open(folder) for folder in asked.hidden]
    batches = Batches(states, target.hidden_size, asked.tokens, asked.seed, device)
    vocab, share = frequent_tokens(batches.training, target.vocab_size, min(asked.draft_vocab, target.vocab_size))
    state = asked.out / "state.pt"
    if state.exists():
        # More data may have come since: the head keeps the vocabulary that it began with.
        vocab = torch.load(state, weights_only=True, map_location="cpu")["head"]["vocab"]
    head = _head(asked, target, states[0].boundaries, vocab)
    head.start_from(weights, batches.load(batches.training[:8]))
    head.to(device)
    ends = TargetEnds(weights.embedding.bfloat16().to(device), weights.head[vocab].bfloat16().to(device))
    recipe = Recipe(
        asked.epochs,
        asked.minutes,
        asked.learning_rate,
        0.01,
        tuple(0.8**step for step in range(asked.steps)),
        asked.single,
    )
    asked.out.mkdir(parents=True, exist_ok=True)
    about = {
        "sequences": len(batches.training),
        "answer_tokens": batches.num_tokens,
        "held_out": len(batches.held_out),
        "draft_vocabulary": len(vocab),
        "share_of_answer_tokens": round(share, 4),
        "parameters": sum(p.numel() for p in head.parameters()),
        "arguments": {name: str(value) for name, value in vars(asked).items()},
    }
    (asked.out / "about.json").write_text(json.dumps(about, indent=2) + "\n")
    Training(head, batches, ends, recipe, dict(checkpoint.config), asked.out).run(bar)


def _check_begun(asked: argparse.Namespace) -> None:
    """Raise a UserError if the folder holds a training of another head, which would be spoilt."""
    about = asked.out / "about.json"
    if about.exists():
        begun = json.loads(about.read_text())["arguments"]
        for name in ("method", "experts", "top_k", "expert_width", "shared"):
            if begun.get(name) != str(getattr(asked, name)):
                flag = "--" + name.replace("_", "-")
                raise UserError(f"{asked.out}: holds a training with {flag} {begun.get(name)}; name another folder")


def _head(asked: argparse.Namespace, target: ModelConfig, boundaries: tuple[int, ...], vocab: torch.Tensor) -> Head:
    if asked.method == "eagle3":
        return Eagle3Head(target, boundaries, vocab)
    moe = target.moe
    experts = asked.experts if asked.experts is not None else moe.num_experts if moe else 0
    top_k = asked.top_k or (moe.top_k if moe else 1)
    width = asked.expert_width or (moe.intermediate_size if moe and experts else target.intermediate_size)
    if experts and top_k > experts:
        raise UserError(f"--top-k {top_k}: more than the {experts} experts")
    shared = asked.shared or (moe.shared_intermediate_size // moe.intermediate_size if moe else 1)
    return MTPHead(target, vocab, FeedForward(width, experts, top_k, shared))


def _report(asked: argparse.Namespace) -> Command:
    from tools.train_draft.report import report

    speculative = json.loads(asked.speculative_config)
    settings = _settings(asked, speculative=speculative, max_num_seqs=asked.batch)
    return lambda bar: report(settings, asked.prompts, asked.max_tokens, bar)
