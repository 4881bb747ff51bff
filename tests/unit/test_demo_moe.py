"""`outrider demo moe`: what it writes, and what it says of it, with and without a packaged MTP layer."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from server.cli import main
from server.demo import write_moe as writing
from server.demo.command import ready_text
from server.flags import parse_serve

MTP = "model.layers.30.eh_proj.weight"


@pytest.fixture
def few_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the embedded model's, which take a minute to write."""

    def tensors(checkpoint: object) -> Iterator[tuple[str, Tensor]]:
        yield "model.layers.0.mlp.experts.0.up_proj.weight", torch.zeros(8, 64, dtype=torch.bfloat16)

    monkeypatch.setattr(writing, "upcycled_tensors", tensors)


def package(monkeypatch: pytest.MonkeyPatch, head: Path | None) -> None:
    if head is not None:
        head.mkdir()
        save_file({MTP: torch.zeros(8, 64, dtype=torch.bfloat16)}, head / "model.safetensors")
        (head / "README.md").write_text("trained")
    monkeypatch.setattr(writing, "packaged_head", lambda name: head)


@pytest.mark.usefixtures("few_tensors")
@pytest.mark.parametrize("experts", ["bf16", "int4"])
@pytest.mark.parametrize("packaged", [True, False])
def test_what_it_says_is_what_it_wrote(
    packaged: bool,
    experts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package(monkeypatch, tmp_path / "head" if packaged else None)
    out = tmp_path / "moe"
    assert main(["demo", "moe", "--out", str(out), "--experts", experts]) == 0
    assert json.loads((out / "config.json").read_text())["num_nextn_predict_layers"] == int(packaged)
    assert (MTP in load_file(out / "model.safetensors")) == packaged
    said, command = capsys.readouterr().out.splitlines()
    assert ("with a bf16 MTP layer" in said) == packaged and ("without an MTP layer" in said) != packaged
    draft = parse_serve(shlex.split(command)[2:]).settings.speculative
    assert draft is not None and draft.method == ("mtp" if packaged else "ngram")


def test_the_command_names_any_folder() -> None:
    words = shlex.split(ready_text(Path("/a b/[c]"), "int4", with_mtp=True).splitlines()[1])
    assert parse_serve(words[2:]).settings.model == "/a b/[c]"


@pytest.mark.usefixtures("few_tensors")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_of_any_new_file(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, None)
    before = os.umask(umask)
    try:
        for experts in ("bf16", "int4"):
            writing.write_moe(tmp_path / experts, experts)
    finally:
        os.umask(before)
    files = [file for folder in tmp_path.iterdir() for file in folder.iterdir()]
    assert {file.name for file in files} >= {"model.safetensors", "config.json", "tokenizer.json"}
    assert {file.name: oct(file.stat().st_mode & 0o777) for file in files} == {
        file.name: oct(0o666 & ~umask) for file in files
    }
