"""Random states of decoding sequences, for the kernels that read and change them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from server.engine import resident
from server.engine.kernels import resident as compiled
from server.engine.kv.groups import Pages
from server.engine.resident import ResidentState, StepInputs, Verdict

PLACES, WIDTH, IDLE = 9, 12, 8


@dataclass(frozen=True)
class Case:
    """Rows of a step, two of padding among them."""

    state: ResidentState
    at: Tensor
    pages: Pages
    sampled: Tensor
    limits: Tensor
    by_lot: Tensor
    drafts: Tensor
    best: Tensor


def make_case(count: int, pages: Pages, seed: int) -> Case:
    random = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=random)

    lengths = integers(WIDTH * pages.block_size - count, PLACES)
    lengths[IDLE] = 0
    state = ResidentState(lengths, integers(4, PLACES, count), integers(1000, PLACES, WIDTH))
    state.blocks[IDLE] = 0
    at = torch.cat((torch.randperm(IDLE, generator=random)[:5], torch.tensor([IDLE, IDLE])))
    rows = len(at)
    by_lot = torch.where(integers(2, rows) == 0, integers(count, rows), torch.tensor(-1))
    best = torch.randn(rows, count, generator=random)
    best[1, count - 1], best[3, 0] = float("nan"), float("inf")
    return Case(
        state,
        at,
        pages,
        # Few different tokens, so that drafts are often right.
        integers(4, rows, count),
        integers(count, rows),
        by_lot,
        integers(1000, rows, count - 1),
        best,
    )


def check_step(case: Case, device: torch.device) -> None:
    """All four kernels on `device` against the reference on the CPU."""
    cpu, count = torch.device("cpu"), case.sampled.shape[1]
    ours, theirs = _inputs(case, device), _inputs(case, cpu)
    state = _moved(case.state, device)
    at = case.at.to(device)
    compiled.gather_inputs(state, at, ours, case.pages)
    resident.gather_inputs(case.state, case.at, theirs, case.pages)
    for name in ("ids", "positions", "slots", "lengths"):
        assert torch.equal(getattr(ours, name).cpu(), getattr(theirs, name)), name
    for row in range(len(case.at)):
        used = -(-int(theirs.lengths[row]) // case.pages.page_size)
        assert torch.equal(ours.tables[row, :used].cpu(), theirs.tables[row, :used])

    verdict = compiled.verify(state, at, case.sampled.to(device), case.limits.to(device), case.by_lot.to(device))
    expected = resident.verify(case.state, case.at, case.sampled, case.limits, case.by_lot)
    for name in ("first", "inputs", "emitted", "accepted", "real"):
        assert torch.equal(getattr(verdict, name).cpu(), getattr(expected, name)), name

    got = compiled.token_places(verdict.first, count, state.blocks[at], verdict.real, case.pages.block_size)
    for one, other in zip(got, (theirs.positions, theirs.slots), strict=True):
        assert torch.equal(one.cpu(), other)

    results = torch.full((len(at), 2 * count), -7, dtype=torch.int64, device=device)
    compiled.keep(state, at, verdict, case.drafts.to(device), case.best.to(device), results)
    want = torch.full((len(at), 2 * count), -7, dtype=torch.int64)
    resident.keep(case.state, case.at, expected, case.drafts, case.best, want)
    assert torch.equal(results.cpu(), want)
    assert want[1, count] == want[3, count] == -1 and (want[[0, 2, 4], count] >= 0).all()
    assert torch.equal(state.lengths.cpu(), case.state.lengths) and state.lengths[IDLE] == 0
    assert torch.equal(state.tokens[:IDLE].cpu(), case.state.tokens[:IDLE])


def accepted_by_definition(case: Case, row: int) -> int:
    """Leading drafts that the target chose too, up to the row's limit."""
    if case.by_lot[row] >= 0:
        return int(case.by_lot[row])
    drafts = case.state.tokens[case.at[row], 1:].tolist()
    chosen = case.sampled[row].tolist()
    count = 0
    while count < min(int(case.limits[row]), len(drafts)) and drafts[count] == chosen[count]:
        count += 1
    return count


def reference_verdict(case: Case) -> Verdict:
    return resident.verify(case.state, case.at, case.sampled, case.limits, case.by_lot)


def _inputs(case: Case, device: torch.device) -> StepInputs:
    tokens = case.sampled.numel()
    return StepInputs(
        ids=torch.full((tokens,), -7, device=device),
        positions=torch.full((tokens,), -7, device=device),
        slots=torch.full((tokens,), -7, device=device),
        lengths=torch.full((len(case.at),), -7, dtype=torch.int32, device=device),
        tables=torch.full((len(case.at), WIDTH * case.pages.per_block), -7, device=device),
    )


def _moved(state: ResidentState, device: torch.device) -> ResidentState:
    return ResidentState(*(part.clone().to(device) for part in (state.lengths, state.tokens, state.blocks)))
