"""`outrider bench kernels` on a tiny shape: every backend is timed or says why not."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from server.bench.kernels import bench_kernels
from server.config_faults import UsageError
from server.engine.attention.registry import ATTENTION_BACKENDS
from server.engine.moe.registry import MOE_BACKENDS


def test_all_backends_are_in_the_table_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out, path = io.StringIO(), tmp_path / "figures.json"
    flags = ["--shape", "tiny-moe", "--batch-sizes", "1,3", "--context", "70", "--json", str(path)]
    assert bench_kernels(flags, Console(file=out, width=200)) == 0
    report = json.loads(path.read_text(encoding="utf-8"))
    for component, backends in (("attention", ATTENTION_BACKENDS), ("moe", MOE_BACKENDS)):
        own = [figure for figure in report["figures"] if figure["component"] == component]
        assert {figure["backend"] for figure in own} == set(backends)
        for name in backends:
            mine = [figure for figure in own if figure["backend"] == name]
            timed = [figure["work"] for figure in mine if figure["milliseconds"]]
            assert len(timed) == 2 or (not timed and mine[0]["why_not"])
            assert name in out.getvalue()
    assert report["copy_bytes_per_second"] > 1e8


def test_a_bad_flag() -> None:
    with pytest.raises(UsageError, match="--batch-sizes"):
        bench_kernels(["--batch-sizes", "0"], Console(file=io.StringIO()))
