"""What the packaged heads are worth, recorded: a fault that only lowers acceptance changes no text, but these counts.

Greedy, fp32, on the CPU. `python -m tests.spec.test_trained_heads` records anew after a head was trained anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from server.checkpoint.locate import locate
from server.checkpoint.packaged_heads import EMBEDDED_MODEL_HEAD
from server.checkpoint.tokenizer import load_tokenizer
from server.demo.write_moe import write_moe
from tests.spec.engine_harness import make_engine
from tools.train_draft.prompts import read_prompts

ROOT = Path(__file__).parents[2]
HELD_OUT = ROOT / "tools" / "train_draft" / "held_out.jsonl"
RECORD = Path(__file__).parent / "trained_heads.json"
TOKENS = 24
Counts = dict[str, list[int]]


def counts(model: Path | None, speculative: Mapping[str, Any], prompts: slice, **settings: Any) -> Counts:
    """Drafted and accepted tokens by position."""
    options: dict[str, Any] = {"max_model_len": 512, "num_kv_blocks": 64} | settings
    ids = read_prompts(HELD_OUT, load_tokenizer(locate(None)))[prompts]
    engine = make_engine(model, {"num_speculative_tokens": 3, **speculative}, **options)
    engine.generate(ids, max_tokens=TOKENS, stop_token_ids=(2,))
    found = engine.counts()
    return {"drafted": list(found.drafted), "accepted": list(found.accepted)}


def eagle3(prompts: slice = slice(0, 100, 12), **settings: Any) -> Counts:
    draft = {"model": EMBEDDED_MODEL_HEAD} | settings.pop("draft", {})
    return counts(None, draft, prompts, **settings)


def mtp(model: Path, prompts: slice = slice(0, 100, 12), **settings: Any) -> Counts:
    return counts(model, {"method": "mtp"}, prompts, **settings)


def check(name: str, found: Counts) -> None:
    wanted = json.loads(RECORD.read_text())[name]
    if found == wanted:
        return
    lines = [f"acceptance of {name} has changed (recorded -> now):"]
    for position, (was, now) in enumerate(zip(_rates(wanted), _rates(found), strict=True)):
        lines.append(f"  position {position}: {was} -> {now}")
    pytest.fail("\n".join(lines))


def _rates(found: Counts) -> list[str]:
    pairs = zip(found["accepted"], found["drafted"], strict=True)
    return [f"{accepted} of {drafted} ({accepted / max(1, drafted):.1%})" for accepted, drafted in pairs]


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "moe"
    write_moe(folder, "bf16")
    return folder


def test_eagle3_as_recorded() -> None:
    check("eagle3", eagle3())


@pytest.mark.slow
def test_mtp_as_recorded(moe: Path) -> None:
    check("mtp", mtp(moe))


SHORT = slice(0, 30, 15)


@pytest.mark.slow
def test_eagle3_with_any_block_size_and_backend() -> None:
    """A head that misreads its own cache shows here and nowhere else."""
    wanted = eagle3(SHORT)
    for block_size in (32, 64, 128, 256):
        assert eagle3(SHORT, block_size=block_size, num_kv_blocks=16) == wanted, block_size
    assert eagle3(SHORT, draft={"attention_backend": "triton"}) == wanted


@pytest.mark.slow
def test_mtp_with_any_block_size(moe: Path) -> None:
    wanted = mtp(moe, SHORT)
    for block_size in (64, 256):
        assert mtp(moe, SHORT, block_size=block_size, num_kv_blocks=16) == wanted, block_size


def test_a_drop_is_shown_by_position(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"eagle3": {"drafted": [10, 6, 3], "accepted": [6, 3, 1]}}))
    monkeypatch.setattr(f"{__name__}.RECORD", record)
    with pytest.raises(pytest.fail.Exception, match=r"position 1: 3 of 6 \(50.0%\) -> 1 of 5 \(20.0%\)"):
        check("eagle3", {"drafted": [10, 5, 1], "accepted": [5, 1, 0]})


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        write_moe(Path(folder) / "moe", "bf16")
        record = {"eagle3": eagle3(), "mtp": mtp(Path(folder) / "moe")}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
