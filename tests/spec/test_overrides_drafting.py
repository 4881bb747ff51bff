"""What the keys of drafting do while the engine runs: how many tokens are drafted, when, and how they are accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine.models.decoder import CausalLM
from server.engine.models.draft import TargetHidden
from server.engine.request import Request
from server.engine.sampling.request import RequestSampling
from server.engine.step import DraftRow
from server.messages import EngineRequest, SamplingParams
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.override_models import draft_runner
from tests.spec.tiny_eagle3 import write_eagle3
from tests.spec.tiny_models import noisy_copy, self_draft, write_llama

PROMPT = [1, 2, 3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("drafting") / "llama", num_hidden_layers=4)


@pytest.fixture(scope="module")
def perfect(target: Path) -> dict[str, Any]:
    """A draft that is always right, so that what it proposes is what the settings allow."""
    return {"method": "draft_model", "model": str(self_draft(target, target.parent / "self"))}


@pytest.fixture(scope="module")
def poor(target: Path) -> dict[str, Any]:
    """A draft that is nearly always wrong."""
    return {"method": "draft_model", "model": str(noisy_copy(target, target.parent / "noisy", 3.0))}


def run(target: Path, speculative: dict[str, Any], new: int = 33, batch: int = 1, **settings: Any) -> Harness:
    engine = make_engine(target, speculative, **settings)
    answers = engine.generate([PROMPT] * batch, max_tokens=new)
    assert answers == [make_engine(target, **settings).generate([PROMPT], max_tokens=new)[0]] * batch
    return engine


def lengths(engine: Harness) -> list[int]:
    """Drafted tokens of the steps after the prompt's."""
    return [len(row.drafts) for plan in engine.steps[1:] for row in plan.rows]


@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_named_k_is_the_length_of_every_draft(k: int, target: Path, perfect: dict[str, Any]) -> None:
    engine = run(target, perfect | {"num_speculative_tokens": k}, new=4 * (k + 1) + 1)
    assert lengths(engine) == [k] * 4
    assert engine.counts().accepted == engine.counts().drafted == [4] * k


@pytest.mark.parametrize(
    ("keys", "first"),
    [
        ({}, [3, 2, 1]),
        ({"adaptive_k": False}, [3, 3, 3]),
        ({"num_speculative_tokens": 4}, [4, 4, 4]),
        ({"num_speculative_tokens": 4, "adaptive_k": True}, [4, 3, 2]),
        ({"num_speculative_tokens": 4, "adaptive_k": "auto"}, [4, 4, 4]),
    ],
)
def test_k_follows_how_drafts_fare_unless_it_is_named(
    keys: dict[str, Any], first: list[int], target: Path, poor: dict[str, Any]
) -> None:
    assert lengths(run(target, poor | keys, new=12))[:3] == first


def test_the_schedule_goes_by_running_sequences(target: Path, perfect: dict[str, Any]) -> None:
    schedule = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 1, 2], [3, 64, 0]]}
    for batch, k in ((1, 2), (2, 3), (3, 0)):
        engine = run(target, perfect | schedule, new=13, batch=batch, enable_prefix_caching=False)
        assert set(lengths(engine)[: 2 * batch]) == {k}


def test_beyond_its_own_limit_the_draft_rests(target: Path, perfect: dict[str, Any]) -> None:
    engine = run(target, perfect | {"num_speculative_tokens": 4, "max_model_len": 20})
    rows = [row for plan in engine.steps[1:] for row in plan.rows]
    assert max(row.end for row in rows if row.drafts) == 20
    assert [len(row.drafts) for row in rows if row.start >= 20] == [0] * 19
    assert engine.counts().drafted[0] > 2


def test_synthetic_rates_are_kept_at_every_position(target: Path, poor: dict[str, Any]) -> None:
    synthetic = {"rejection_sample_method": "synthetic", "num_speculative_tokens": 3}
    engine = make_engine(target, poor | synthetic | {"synthetic_acceptance_rates": [1.0, 1.0, 0.0]})
    engine.generate([PROMPT], max_tokens=30)
    drafted, accepted = engine.counts().drafted, engine.counts().accepted
    assert drafted[0] >= 9 and accepted == [drafted[0], drafted[1], 0]


@pytest.mark.parametrize(("method", "drawn"), [(None, False), ("greedy", False), ("probabilistic", True)])
def test_drafts_are_drawn_only_when_asked_for(
    method: str | None, drawn: bool, target: Path, perfect: dict[str, Any]
) -> None:
    engine = make_engine(target, perfect | ({"draft_sample_method": method} if method else {}))
    request_id = engine.add(PROMPT, temperature=1.5, max_tokens=12, seed=3)
    seen = []
    while engine.step():
        waiting = [request for request in engine.scheduler._running if request.draft.token_ids]
        seen += [request.draft.probabilities is not None for request in waiting]
    assert len(engine.tokens(request_id)) == 12
    assert seen and set(seen) == {drawn}


@pytest.mark.parametrize(
    ("keys", "draft"),
    [
        ({}, (20, 21, 22)),
        ({"prompt_lookup_max": 2}, (20, 21, 22)),
        ({"prompt_lookup_min": 1, "prompt_lookup_max": 1}, (30, 31, 32)),
        ({"prompt_lookup_min": 4}, ()),
        ({"prompt_lookup_min": 3, "prompt_lookup_max": 3}, (20, 21, 22)),
    ],
)
def test_ngram_looks_for_matches_of_the_named_lengths(
    keys: dict[str, Any], draft: tuple[int, ...], target: Path
) -> None:
    engine = make_engine(target, {"method": "ngram"} | keys)
    tokens = [4, 5, 6, 20, 21, 22, 8, 6, 30, 31, 32, 4, 5, 6]
    params = SamplingParams(max_tokens=9, seed=0)
    sampling = RequestSampling(params, tokens, 260)
    request = Request(EngineRequest(1, tokens, params, 0.0), sampling, max_len=30, tokens=tokens)
    row = DraftRow(request, 0, len(tokens), 0, limit=3)
    assert engine.built.draft is not None
    hidden = TargetHidden(torch.empty(len(tokens), 32))
    assert engine.built.draft.speculator.proposer.propose([row], hidden)[0].token_ids == draft


def test_the_named_layers_are_captured_and_read(target: Path) -> None:
    head = str(write_eagle3(target, target.parent / "head", boundaries=(0, 1, 3)))
    seen = {}
    for layers in (None, [0, 1, 3], [1, 2, 4]):
        keys = {"method": "eagle3", "model": head} | ({"aux_hidden_state_layers": layers} if layers else {})
        engine = run(target, keys | {"num_speculative_tokens": 2}, new=9)
        model: CausalLM = engine.built.target.model
        assert list(model.capture) == (layers or [0, 1, 3]) == list(draft_runner(engine).model.config.capture)
        seen[str(layers)] = engine.steps
    drafts = {name: [row.drafts for plan in plans for row in plan.rows] for name, plans in seen.items()}
    assert drafts["None"] == drafts["[0, 1, 3]"] != drafts["[1, 2, 4]"]
