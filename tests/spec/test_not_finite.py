"""A request whose numbers overflow ends with an error that says so, and leaves nothing behind for the next one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from server.engine.core import EngineCore
from server.engine.grammar_compile import GrammarCompiler
from server.messages import EngineOutputs, EngineRequest, RequestOutput, SamplingParams, Shutdown
from tests.spec.engine_harness import make_engine
from tests.spec.tiny_models import changed_copy, self_draft, write_llama

POISON = 200
"""The one token whose embedding reaches a value projection of 3e38."""


@dataclass
class Inbox:
    """The other end of the engine's link, one request after the other."""

    waiting: list[EngineRequest]
    outputs: dict[int, list[RequestOutput]] = field(default_factory=dict)
    busy: bool = False

    def send(self, message: object) -> None:
        assert isinstance(message, EngineOutputs)
        for output in message.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
            self.busy = output.finish_reason is None

    def receive(self, wait_seconds: float) -> list[EngineRequest | Shutdown]:
        if self.busy:
            return []
        self.busy = True
        return [self.waiting.pop(0)] if self.waiting else [Shutdown()]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def poison(name: str, tensor: Tensor) -> Tensor:
        if name == "model.embed_tokens.weight":
            tensor[:, 0] = 0
            tensor[POISON] = 0
            tensor[POISON, 0] = 1
        if name == "model.layers.0.self_attn.v_proj.weight":
            tensor[:, 0] = 3e38
        return tensor

    folder = tmp_path_factory.mktemp("poison")
    return changed_copy(write_llama(folder / "plain"), folder / "poison", poison)


@pytest.mark.parametrize("drafted", [False, True])
def test_the_next_owner_of_a_block_reads_nothing_of_an_overflow(target: Path, drafted: bool, tmp_path: Path) -> None:
    speculative = None
    if drafted:
        draft = self_draft(target, tmp_path / "draft")
        speculative = {"method": "draft_model", "model": draft, "num_speculative_tokens": 3}
    good = [3, 1, 4, 1, 5, 9]
    want = make_engine(target, num_kv_blocks=4).generate([good], max_tokens=12)[0]
    engine = make_engine(target, speculative, num_kv_blocks=4)
    params = SamplingParams(max_tokens=12, seed=0, temperature=0.0)
    # The poisoned prompt fills the blocks that the next request gets, beyond that one's length.
    prompts = {1: good, 2: [POISON] * 40, 3: good}
    inbox = Inbox([EngineRequest(i, prompt, params, arrived=float(i)) for i, prompt in prompts.items()])
    speculator = engine.built.draft.speculator if engine.built.draft else None
    core = EngineCore(
        inbox, engine.scheduler, engine.executor, speculator, GrammarCompiler(lambda: engine.vocabulary), 260, 260, 64
    )
    with torch.inference_mode():
        core.run()
    (broken,) = inbox.outputs[2]
    assert broken.finish_reason == "error"
    assert broken.error is not None and "not finite" in broken.error and "--dtype" in broken.error
    for request_id in (1, 3):
        assert [token for output in inbox.outputs[request_id] for token in output.token_ids] == want
    assert engine.scheduler.kv.pool.usage == 0
