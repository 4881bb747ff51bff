"""The training loop: fp32 weights, bf16 products, one learning rate that falls to zero with the budget."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from tools.train_draft.batches import Batches, TrainingBatch
from tools.train_draft.export import export
from tools.train_draft.unroll import Head, TargetEnds, Unrolled, unroll

_SAVE_SECONDS, _SAVE_SHARE = 60.0, 0.05
"""The least time between two checkpoints, and the largest share of the time that they take."""
_AVERAGE = 0.99
_WARM_UP = 0.02
_NOT_TURNED = ("lm_head", "mlp.gate.weight")


@dataclass(frozen=True)
class Recipe:
    """How long and how fast."""

    epochs: int
    minutes: float | None
    """The budget ends here, if the epochs have not ended before."""
    learning_rate: float
    weight_decay: float
    step_weights: tuple[float, ...]
    """What each unrolled step counts in the loss."""
    single: float
    """The share of the budget in which the first step alone is trained: it is a third of the work, and worth most."""


@dataclass
class _State:
    epoch: int = 0
    batch: int = 0
    steps: int = 0
    seconds: float = 0.0


def _optimizers(head: Head, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon (arXiv 2502.16982) for the layer's matrices, AdamW for norms, router and output embedding."""
    turned = [p for name, p in head.named_parameters() if p.dim() == 2 and not name.startswith(_NOT_TURNED)]
    inside = {id(p) for p in turned}
    others = [p for p in head.parameters() if id(p) not in inside]
    muon = torch.optim.Muon(
        turned, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(others, lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)]


class Training:
    """Trains one head; a second run over the same folder goes on where the first one stopped."""

    def __init__(
        self, head: Head, batches: Batches, ends: TargetEnds, recipe: Recipe, target: dict[str, Any], folder: Path
    ) -> None:
        """Set up, from what the folder holds if it holds a state.

        Args:
            head: with its starting weights.
            batches: the data.
            ends: the target's embedding and head.
            recipe: see `Recipe`.
            target: the target's config.json, for the checkpoint.
            folder: of the state, the curve and the checkpoint.
        """
        self._head, self._batches, self._ends, self._recipe = head, batches, ends, recipe
        self._target, self._folder = target, folder
        self._device = ends.embedding.device.type
        self._optimizers = _optimizers(head, recipe)
        self._average = {name: p.detach().clone() for name, p in head.named_parameters()}
        self._state = _State()
        folder.mkdir(parents=True, exist_ok=True)
        if self._file.exists():
            saved = torch.load(self._file, weights_only=True, map_location=self._device)
            head.load_state_dict(saved["head"], strict=False)
            for optimizer, state in zip(self._optimizers, saved["optimizers"], strict=True):
                optimizer.load_state_dict(state)
            self._average, self._state = saved["average"], _State(**saved["state"])

    @property
    def _file(self) -> Path:
        return self._folder / "state.pt"

    def run(self, progress: Progress) -> None:
        """Train to the end of the budget; checkpoint and curve are written on the way."""
        self._head.train()
        saved, pause = time.monotonic(), _SAVE_SECONDS
        task = progress.add_task("training", total=1.0)
        progress.update(task, completed=self._spent(len(self._batches.epoch(0))))
        while self._state.epoch < self._recipe.epochs:
            epoch = self._batches.epoch(self._state.epoch)
            losses: list[float] = []
            for places in epoch[self._state.batch :]:
                started = time.monotonic()
                losses.append(self._step(self._batches.load(places), self._spent(len(epoch))))
                self._state.batch += 1
                self._state.steps += 1
                now = time.monotonic()
                self._state.seconds += now - started
                progress.update(task, completed=self._spent(len(epoch)), description=f"loss {losses[-1]:.3f}")
                if now - saved > pause:
                    self._save(losses)
                    losses, saved = [], time.monotonic()
                    pause = max(_SAVE_SECONDS, (saved - now) / _SAVE_SHARE)
                if self._spent(len(epoch)) >= 1:
                    self._save(losses)
                    return
            self._state.epoch, self._state.batch = self._state.epoch + 1, 0
        self._save([])

    def _spent(self, batches: int) -> float:
        """The share of the budget, 0 to 1."""
        done = (self._state.epoch + self._state.batch / batches) / self._recipe.epochs
        if self._recipe.minutes is None:
            return done
        return max(done, self._state.seconds / 60 / self._recipe.minutes)

    def _step(self, batch: TrainingBatch, spent: float) -> float:
        rate = min(spent / _WARM_UP, 1.0) * 0.5 * (1 + math.cos(math.pi * spent)) + 1e-3
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * self._recipe.learning_rate
        with torch.autocast(self._device, torch.bfloat16):
            weights = self._recipe.step_weights
            loss = unroll(self._head, batch, self._ends, weights[:1] if spent < self._recipe.single else weights).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._head.after_step()
        # The average over the last hundred steps is better than any one of them.
        keep = min(_AVERAGE, 1 - 1 / (self._state.steps + 1))
        for name, p in self._head.named_parameters():
            self._average[name].lerp_(p.detach(), 1 - keep)
        return loss.item()

    def _save(self, losses: Sequence[float]) -> None:
        state = {
            "head": self._head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "average": self._average,
            "state": asdict(self._state),
        }
        torch.save(state, self._file.with_suffix(".new"))
        self._file.with_suffix(".new").replace(self._file)
        current = {name: p.detach().clone() for name, p in self._head.named_parameters()}
        self._fill(self._average)
        point = {"minutes": round(self._state.seconds / 60, 1), "steps": self._state.steps, "epoch": self._state.epoch}
        if losses:
            point["loss"] = round(sum(losses) / len(losses), 4)
        point |= evaluate(self._head, self._batches, self._ends, len(self._recipe.step_weights))
        with (self._folder / "curve.jsonl").open("a") as file:
            file.write(json.dumps(point) + "\n")
        export(self._head, self._target, self._folder / "checkpoint")
        self._fill(current)

    @torch.no_grad()
    def _fill(self, weights: dict[str, Tensor]) -> None:
        for name, p in self._head.named_parameters():
            p.copy_(weights[name])


@torch.no_grad()
def evaluate(head: Head, batches: Batches, ends: TargetEnds, steps: int) -> dict[str, Any]:
    """Acceptance on held-out answers, along the true text: an estimate that needs no engine.

    Returns:
        `acceptance`: of each position, given that all before it were accepted; `length`: tokens a step.
    """
    head.eval()
    totals = torch.zeros(2, steps)
    for batch in batches.held_out_batches():
        with torch.autocast(ends.embedding.device.type, torch.bfloat16):
            made: Unrolled = unroll(head, batch, ends, [1.0] * steps)
        totals += torch.tensor((made.accepted, made.anchors))
    head.train()
    reached = (totals[0] / totals[1]).tolist()
    given = [now / before if before else 0.0 for now, before in zip(reached, [1.0, *reached], strict=False)]
    return {"acceptance": [round(value, 4) for value in given], "length": round(1 + sum(reached), 3)}
