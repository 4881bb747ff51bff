"""What the built layers hold and what users are told, for every proposer, key and state; the target stays the same."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from server.config import Settings
from server.engine.layers.norm import RMSNorm
from server.engine.plan import check_plan, make_plan
from server.messages import EngineReady
from server.metrics.recorder import Metrics
from tests.spec.engine_harness import Harness, make_engine
from tests.spec.override_models import NEURAL, Folders, draft_runner, held, modules, told, write_folders
from tests.spec.override_table import AUX, BUILT, DRAFTING, LOOKUP, NEURAL_DRAFTING, OWN_K, Override, Told

QUICK = ([1, 2, 3, 4, 5] * 4, 5)
INTERPRETED = ([1, 2, 3, 1, 2], 3)
"""A prompt and how much to answer: Triton's interpreter takes its time."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("overrides"))


@functools.cache
def alone(target: Path, settings: tuple[tuple[str, Any], ...], slow: bool) -> Harness:
    """The target without a draft, which has answered the prompt."""
    engine = make_engine(target, **dict(settings))
    answer(engine, slow)
    return engine


def answer(engine: Harness, slow: bool) -> list[int]:
    prompt, new = INTERPRETED if slow else QUICK
    return engine.generate([prompt], max_tokens=new)[0]


def on_metrics(engine: Harness, role: str) -> dict[str, Told]:
    metrics = Metrics("m", "outrider")
    metrics.engine_ready(EngineReady(engine.built.rows, [], engine.built.models, 1, 1, "cpu", 0.0, 64))
    families = text_string_to_metric_families(metrics.render("")[0].decode())
    samples = [s for family in families if family.name == "outrider_backend_info" for s in family.samples if s.value]
    rows = [s.labels for s in samples if s.labels["role"] == role]
    found = {labels["component"]: Told(labels["requested"], labels["resolved"], labels["source"]) for labels in rows}
    assert len(found) == len(rows)
    return found


def on_check(settings: Settings, role: str) -> dict[str, Told]:
    report = check_plan(settings)
    assert report.ok and not report.errors
    rows = [row for row in report.rows if row.role == role]
    return {row.component: Told(row.requested, row.resolved, row.source) for row in rows}


def started(folders: Folders, proposer: str, override: Override) -> Harness:
    """The built engine, its answer and all that it says compared with what does not depend on the override."""
    engine = make_engine(folders.target, folders.drafts[proposer] | override.speculative, **override.settings)
    slow = "tri" in f"{override.draft}{override.target}".lower()
    lone = alone(folders.target, tuple(override.settings.items()), slow)
    assert engine.plan.target == lone.plan.target
    assert held(engine.built.target) == held(lone.built.target)
    assert (
        told(engine, "target")
        == told(lone, "target")
        == on_metrics(engine, "target")
        == on_check(engine.settings, "target")
    )
    assert told(engine, "draft") == on_metrics(engine, "draft") == on_check(engine.settings, "draft")
    assert answer(engine, slow) == lone.tokens(1)
    return engine


def weights_of(runner: Any) -> str:
    """Random weights have all norms at 1, those of the files have none there."""
    ones = {bool((module.weight == 1).all()) for module in modules(runner.model, RMSNorm)}
    assert len(ones) == 1
    return "dummy" if ones == {True} else "safetensors"


@pytest.mark.parametrize("proposer", NEURAL)
@pytest.mark.parametrize("override", BUILT, ids=str)
def test_the_drafts_layers_hold_what_the_table_says(override: Override, proposer: str, folders: Folders) -> None:
    engine = started(folders, proposer, override)
    assert told(engine, "draft")[override.row] == override.told
    runner = draft_runner(engine)
    built = held(runner) | {"load_format": weights_of(runner), "tensor_parallel_size": str(runner.setup.group.size)}
    assert built[override.row] == override.told.resolved
    assert weights_of(engine.built.target) == (
        "dummy" if override.settings.get("load_format") == "dummy" else "safetensors"
    )


CASES = [
    *((proposer, override) for override in DRAFTING for proposer in ("ngram", *NEURAL)),
    *((proposer, override) for override in NEURAL_DRAFTING for proposer in NEURAL),
    *(("ngram", override) for override in LOOKUP),
    *(("eagle3", override) for override in AUX),
]


@pytest.mark.parametrize(
    ("proposer", "override"), CASES, ids=[f"{proposer}-{override}" for proposer, override in CASES]
)
def test_keys_of_drafting_are_told(proposer: str, override: Override, folders: Folders) -> None:
    options = {"model": str(folders.target), "dtype": "float32"} | override.settings
    draft = folders.drafts[proposer] | override.speculative
    settings = Settings.model_validate(options | {"speculative": draft})
    assert make_plan(settings).target == make_plan(Settings.model_validate(options)).target
    assert on_check(settings, "draft")[override.row] == override.told


@pytest.mark.parametrize("proposer", OWN_K)
def test_k_and_method_when_nobody_names_them(proposer: str, folders: Folders) -> None:
    unset = {key: value for key, value in folders.drafts[proposer].items() if key == "model"}
    method = folders.drafts[proposer]["method"]
    engine = make_engine(folders.target, folders.drafts[proposer])
    assert told(engine, "draft")["num_speculative_tokens"] == Told("unset", OWN_K[proposer], "auto")
    assert told(engine, "draft")["method"] == Told(method, method, "explicit")
    if proposer in ("eagle3", "mtp_own"):
        inferred = make_engine(folders.target, unset)
        assert told(inferred, "draft")["method"] == Told("unset", method, "auto")
        assert draft_runner(inferred).setup.rows == draft_runner(engine).setup.rows
        assert held(draft_runner(inferred)) == held(draft_runner(engine))
    rows = [(row.role, row.component) for row in engine.built.rows]
    assert len(set(rows)) == len(rows)
