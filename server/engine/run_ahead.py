"""Decoding that never waits: sequences whose newest tokens stay on the device and feed the next step there.

The host launches a step before it knows what the last one made: it only says which sequences run, where their blocks
are, and how many drafts each may use. Tokens, lengths, what was accepted and the next drafts live on the device; a copy
of each step's tokens travels to the host while the next step runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from server.engine.graphs import Graphs
from server.engine.models.decoder import CausalLM
from server.engine.models.draft import TargetHidden
from server.engine.request import Request
from server.engine.resident import ResidentState, gather_inputs, keep, verify
from server.engine.runner import ModelRunner
from server.engine.sampling.request import SampleRow
from server.engine.sampling.sampler import Sampler
from server.engine.sampling.transfer import to_device
from server.engine.uniform import UniformForward
from server.spec.device_draft import DeviceDraft, Verified
from server.spec.verify import SyntheticAcceptance

_IN_FLIGHT = 3
"""Steps whose host buffers may be in use at once: one runs, one waits, one is read."""


@dataclass(frozen=True)
class Drafting:
    """How the sequences draft."""

    draft: DeviceDraft
    num_tokens: int
    """k."""
    max_model_len: int
    """Positions of the draft; beyond them a sequence goes on without drafts."""
    synthetic: SyntheticAcceptance | None


@dataclass(frozen=True)
class Launched:
    """A step on its way."""

    requests: list[Request]
    limits: list[int]
    """Drafts that each row verifies."""
    results: Tensor
    """int64 [R, …] on the host, valid after the last event: emitted tokens, how many drafts were accepted (-1: the
    model's numbers are not finite), the next drafts."""
    events: list[torch.cuda.Event]
    """Before the forward pass, after it, and after everything; empty on a CPU."""
    by_lot: list[int] = field(default_factory=list)
    """Accepted drafts of each row where they are drawn by lot."""


@dataclass(frozen=True)
class Outcome:
    """What a step made of one row."""

    token_ids: tuple[int, ...]
    """The accepted drafts and the token after them."""
    drafts: tuple[int, ...]
    """Proposed to follow."""
    broken: bool
    """Whether the model made NaN or infinity of the row; then nothing else counts."""


class RunAhead:
    """Keeps the state of decoding sequences on the device, and launches their steps."""

    def __init__(
        self,
        forward: UniformForward,
        sampled_vocab_size: int,
        max_rows: int,
        width: int,
        drafting: Drafting | None,
        graphs: Graphs,
    ) -> None:
        """Make the state's memory.

        Args:
            forward: the target's, over 1 + k tokens a row.
            sampled_vocab_size: ids that may be sampled.
            max_rows: sequences that run at once at most.
            width: blocks of the longest sequence, with room for the tokens of three more steps.
            drafting: how the sequences draft, or None.
            graphs: keeps what is captured.
        """
        runner: ModelRunner[CausalLM] = forward.runner
        self._forward = forward
        self._vocab_size = sampled_vocab_size
        self._drafting = drafting
        self._graphs = graphs
        self._sampler = Sampler()
        self._pages = runner.pages
        self._device = device = runner.setup.device
        self._idle = max_rows
        """The place of rows of padding."""
        self.drafts = drafting.num_tokens if drafting is not None else 0
        """k."""
        self.per_step = 1 + self.drafts
        """Tokens that a step computes of each sequence, and makes at most."""
        self._state = ResidentState(
            lengths=torch.zeros(max_rows + 1, dtype=torch.int64, device=device),
            tokens=torch.zeros(max_rows + 1, self.per_step, dtype=torch.int64, device=device),
            blocks=torch.zeros(max_rows + 1, width, dtype=torch.int64, device=device),
        )
        self._control = torch.full((3, max_rows), self._idle, dtype=torch.int64, device=device)
        """By row: its place, the drafts that it may use, the drafts that are accepted by lot (-1: none is)."""
        self._results = torch.zeros(max_rows, self.per_step + 1 + self.drafts, dtype=torch.int64, device=device)
        self._controls = deque(_host_memory(self._control) for _ in range(_IN_FLIGHT))
        self._received = deque(_host_memory(self._results) for _ in range(_IN_FLIGHT))
        self._places: dict[int, int] = {}
        """Request id -> place."""
        self._free = list(range(max_rows))
        self._known_blocks = [0] * (max_rows + 1)
        self._emitted_by_lot: dict[int, int] = {}
        """Request id -> tokens in flight, which are known where acceptance is drawn by lot."""

    def serves(self, request: Request) -> bool:
        """Whether the request's tokens can be chosen on the device, without anything that only the host knows."""
        sampling = request.sampling
        plain = request.params.logprobs is None and not sampling.edited(len(request.output))
        return plain and (sampling.greedy or not self.drafts)

    @torch.inference_mode()
    def capture(self, size: int) -> None:
        """Capture what a step of so many rows does, over rows of padding."""
        self._control[0].fill_(self._idle)
        self._control[1:].fill_(-1)
        self._run(self._forward.size(size), None)

    @torch.inference_mode()
    def launch(self, requests: Sequence[Request], wanted: Callable[[Request], int]) -> Launched:
        """Start the next step of sequences whose last one may still be under way.

        Args:
            requests: all that run; their `in_flight` says how many of their steps are under way.
            wanted: how many drafts a request may use.
        """
        limits = self._enter(requests, wanted)
        by_lot = self._draw_lots(requests, limits)
        size = self._forward.size(len(requests))
        control = self._controls[0]
        self._controls.rotate(-1)
        filled = control.numpy()
        filled[0, :size] = self._idle
        filled[0, : len(requests)] = [self._places[request.request_id] for request in requests]
        filled[1, : len(requests)] = limits
        filled[2, :size] = -1
        if by_lot:
            filled[2, : len(requests)] = by_lot
        self._control.copy_(control, non_blocking=True)
        events = self._run(size, None if all(request.sampling.greedy for request in requests) else requests)
        received = self._received[0]
        self._received.rotate(-1)
        received[:size].copy_(self._results[:size], non_blocking=True)
        if events:
            events[-1].record()
        return Launched(list(requests), limits, received, events, by_lot)

    def collect(self, launched: Launched, phase_seconds: dict[str, list[float]]) -> list[Outcome]:
        """Wait for a step; the durations of its phases are appended. Steps are collected in the order of launching."""
        if launched.events:
            before, between, after = launched.events
            after.synchronize()
            phase_seconds.setdefault("target", []).append(before.elapsed_time(between) / 1000)
            name = "draft" if self.drafts else "verify"
            phase_seconds.setdefault(name, []).append(between.elapsed_time(after) / 1000)
        for request, accepted in zip(launched.requests, launched.by_lot, strict=False):
            self._emitted_by_lot[request.request_id] -= accepted + 1
        width = self.per_step
        rows: list[list[int]] = launched.results[: len(launched.requests)].tolist()
        return [Outcome(tuple(row[: row[width] + 1]), tuple(row[width + 1 :]), broken=row[width] < 0) for row in rows]

    def forget(self) -> None:
        """Other steps have run: what the device knows of the sequences is out of date."""
        self._free.extend(self._places.values())
        self._places.clear()
        self._emitted_by_lot.clear()

    def _enter(self, requests: Sequence[Request], wanted: Callable[[Request], int]) -> list[int]:
        """Bring the device's state up to date; returns how many drafts each row may use."""
        running = {request.request_id for request in requests}
        for request_id in [known for known in self._places if known not in running]:
            self._free.append(self._places.pop(request_id))
        limits, entering = [], []
        for request in requests:
            if request.request_id in self._places:
                limits.append(self.limit(request, wanted(request)))
                continue
            place = self._places[request.request_id] = self._free.pop()
            self._known_blocks[place] = 0
            limits.append(len(request.draft.token_ids))
            tokens = (request.tokens[-1], *request.draft.token_ids)
            entering.append([place, request.computed, *tokens, *[0] * (self.per_step - len(tokens))])
        if entering:
            entered = to_device(np.array(entering, np.int64), self._device)
            self._state.lengths.index_copy_(0, entered[:, 0], entered[:, 1])
            self._state.tokens.index_copy_(0, entered[:, 0], entered[:, 2:])
        self._extend_blocks(requests)
        return limits

    def limit(self, request: Request, wanted: int) -> int:
        """How many of the drafts made for it a request may use next."""
        known = len(request.tokens)
        # The last token of a sequence is never a draft; a step under way makes one token at least, 1 + k at most.
        left = request.max_len - known - request.in_flight - 1
        drafting = self._drafting
        within = drafting.max_model_len - known - request.in_flight * self.per_step if drafting is not None else 0
        return max(0, min(wanted, self.drafts, left, within))

    def _extend_blocks(self, requests: Sequence[Request]) -> None:
        width = self._state.blocks.shape[1]
        added: list[int] = []
        blocks: list[int] = []
        for request in requests:
            place = self._places[request.request_id]
            known, count = self._known_blocks[place], min(len(request.blocks), width)
            if count > known:
                added.extend(range(place * width + known, place * width + count))
                blocks.extend(request.blocks[known:count])
                self._known_blocks[place] = count
        if added:
            where, what = to_device(np.array([added, blocks], np.int64), self._device).unbind(0)
            self._state.blocks.view(-1).index_copy_(0, where, what)

    def _draw_lots(self, requests: Sequence[Request], limits: list[int]) -> list[int]:
        """The accepted drafts of each row, where they are drawn by lot."""
        if self._drafting is None or self._drafting.synthetic is None:
            return []
        ahead = [self._emitted_by_lot.get(request.request_id, 0) for request in requests]
        positions = [len(request.output) + tokens for request, tokens in zip(requests, ahead, strict=True)]
        accepted = self._drafting.synthetic.accepted([r.params.seed for r in requests], positions, limits)
        for request, tokens, own in zip(requests, ahead, accepted, strict=True):
            self._emitted_by_lot[request.request_id] = tokens + own + 1
        return accepted

    def _run(self, size: int, sampling: Sequence[Request] | None) -> list[torch.cuda.Event]:
        """Everything on the device: inputs, forward pass, choice of tokens, drafts.

        Args:
            size: rows, the padding among them.
            sampling: the requests where some are not greedy; drawing from distributions is not captured.
        """
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)] if self._device.type == "cuda" else []
        if events:
            events[0].record()
        self._graphs.run(("inputs", self.per_step, size), lambda: self._inputs(size))
        hidden = self._forward.run(size)
        if events:
            events[1].record()
        if sampling is None:
            self._graphs.run(("choose", self.per_step, size), lambda: self._choose(size, hidden))
            return events
        rows = [SampleRow(request.sampling, request.output, (0,) * request.in_flight) for request in sampling]
        sampled = self._sampler(self._forward.runner.model.logits(hidden.final[: len(rows)]), rows).token_ids
        rest = (0, size - len(rows))
        # The sum is finite if all are, but for overflows that are as bad.
        self._keep(size, pad(sampled, rest), hidden.final.sum(-1, dtype=torch.float32), hidden)
        return events

    def _inputs(self, size: int) -> None:
        gather_inputs(self._state, self._control[0, :size], self._forward.inputs, self._pages)

    def _choose(self, size: int, hidden: TargetHidden) -> None:
        best = self._forward.runner.model.logits(hidden.final)[:, : self._vocab_size].max(-1)
        self._keep(size, best.indices, best.values, hidden)

    def _keep(self, size: int, sampled: Tensor, best: Tensor, hidden: TargetHidden) -> None:
        """Verify drafts, draft anew, and bring the state to where the next step begins.

        Args:
            size: rows.
            sampled: int64 [size * per_step], the target's choice after each token.
            best: [size * per_step], numbers of the tokens that are finite unless the model's were not.
            hidden: of the step's tokens.
        """
        at, limits, by_lot = self._control[:, :size].unbind(0)
        verdict = verify(self._state, at, sampled.view(size, -1), limits, by_lot)
        drafts = verdict.emitted[:, :0]
        if self._drafting is not None:
            drafts = self._drafting.draft.draft(Verified(verdict, hidden, self._state.blocks[at]))
        keep(self._state, at, verdict, drafts, best.view(size, -1), self._results[:size])


def _host_memory(like: Tensor) -> Tensor:
    """Memory of the same shape that a GPU copies to and from while the host goes on."""
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
