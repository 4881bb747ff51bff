"""`outrider check` as a user runs it: the plan without weights, its exit code, and that a start then shows the same."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

from tests.e2e.live_server import ROOT, LiveServer
from tests.spec.override_models import Folders, write_folders
from tests.spec.tiny_models import BASE, LLAMA, tiny_tokenizer, write_glm4_moe

COLUMNS = ("role", "component", "requested", "resolved", "source", "why")
GIB = 2**30


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_folders(tmp_path_factory.mktemp("check"))


def check(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
    return subprocess.run(
        [sys.executable, "-m", "server", "check", *map(str, arguments)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def speculative(**keys: Any) -> tuple[str, str]:
    return "--speculative-config", json.dumps(keys)


FLAGS = ("--dtype", "float32", "--moe-backend", "grouped_mm", "--block-size", "128", "--num-kv-blocks", "16")
DRAFT = {"method": "mtp", "num_speculative_tokens": 2, "moe_backend": "torch", "kv_cache_dtype": "bfloat16"}


def test_the_json_has_the_contracts_form_and_says_both_roles(folders: Folders) -> None:
    done = check(folders.target, *FLAGS, *speculative(**DRAFT), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert list(report) == ["ok", "rows", "kv_groups", "errors"] and report["ok"] and report["errors"] == []
    for row in report["rows"]:
        assert list(row) == [*COLUMNS, "rejected"]
        assert row["role"] in ("target", "draft") and row["source"] in ("explicit", "inherited", "auto") and row["why"]
        assert all(list(entry) == ["name", "reason"] for entry in row["rejected"])
    rows = {(row["role"], row["component"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"])
    labels = {key: tuple(row[name] for name in COLUMNS[2:5]) for key, row in rows.items()}
    assert labels["target", "moe"] == ("grouped_mm", "grouped_mm", "explicit")
    assert labels["draft", "moe"] == ("torch", "torch", "explicit")
    assert labels["draft", "kv_cache_dtype"] == ("bfloat16", "bfloat16", "explicit")
    assert labels["draft", "attention"] == ("unset", "torch", "auto")
    assert "torch_int4" in [entry["name"] for entry in rows["draft", "moe"]["rejected"]]
    # Another dtype is another group: the draft's one layer beside the target's three.
    assert [(group["block_size"], group["layers"]) for group in report["kv_groups"]] == [(128, 3), (128, 1)]


def test_people_get_a_table_and_a_verdict(folders: Folders) -> None:
    done = check(folders.target, *FLAGS, *speculative(**DRAFT))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split() == list(COLUMNS) and lines[-1] == "can be served"
    assert any(line.split()[:5] == ["draft", "moe", "torch", "torch", "explicit"] for line in lines)
    assert any(line.startswith("not for the draft's moe: torch_int4: ") for line in lines)
    assert any(line.startswith("KV group 1: 1 layers, blocks of 128 tokens") for line in lines)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_served_ends_with_1_and_the_reason(as_json: bool, folders: Folders) -> None:
    keys = speculative(method="mtp", moe_backend="torch_int4")
    done = check(folders.target, *keys, *(["--json"] if as_json else []))
    assert (done.returncode, done.stderr) == (1, "")
    if as_json:
        report = json.loads(done.stdout)
        assert (report["ok"], report["rows"], report["kv_groups"]) == (False, [], [])
        (error,) = report["errors"]
    else:
        first, last = done.stdout.splitlines()
        assert last == "cannot be served"
        error = first.removeprefix("error: ")
    assert error.startswith("draft: speculative_config.moe_backend: 'torch_int4' cannot serve this model: ")
    assert "what would work: auto, grouped_mm, torch" in error


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"moe_backnd": "torch"}, "did you mean moe_backend?"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens: 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens: -1"),
        ({"num_speculative_tokens": 10_000}, "num_speculative_tokens: 10000"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype: 8"),
    ],
)
def test_c12_wrong_keys_and_values_end_with_2_and_the_key(keys: dict[str, Any], says: str, folders: Folders) -> None:
    done = check(folders.target, *speculative(method="mtp", **keys))
    assert done.returncode == 2 and done.stdout == "" and says in done.stderr and "Traceback" not in done.stderr


def test_no_weight_is_read(tmp_path: Path) -> None:
    """Sixteen gigabytes of weights that are only there in the header: the file is one large hole."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 36, "num_attention_heads": 32}
    config = LLAMA | BASE | shape | {"num_key_value_heads": 8, "head_dim": 128, "torch_dtype": "bfloat16"}
    sizes = {"model.embed_tokens": (260, 4096), "lm_head": (260, 4096), "model.norm": (4096,)}
    for index in range(36):
        layer = f"model.layers.{index}."
        sizes |= {f"{layer}{name}": (4096,) for name in ("input_layernorm", "post_attention_layernorm")}
        sizes |= {
            f"{layer}self_attn.{name}_proj": (rows, 4096)
            for name, rows in zip("qkvo", (4096, 1024, 1024, 4096), strict=True)
        }
        sizes |= {f"{layer}mlp.{name}_proj": (14336, 4096) for name in ("gate", "up")}
        sizes[f"{layer}mlp.down_proj"] = (4096, 14336)
    header, end = {}, 0
    for name, size in sizes.items():
        start, end = end, end + 2 * size[0] * (size[1] if len(size) == 2 else 1)
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": size, "data_offsets": [start, end]}
    assert end > 14 * GIB
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save(str(tmp_path / "tokenizer.json"))
    done = check(tmp_path, *speculative(method="draft_model", model=str(tmp_path)), "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 2 * GIB
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < GIB


def test_broken_weights_do_not_matter_to_it_but_to_a_start(tmp_path: Path) -> None:
    """NaN in all weights: the plan is what it was, and only who reads them refuses them."""
    glm = write_glm4_moe(tmp_path / "glm")
    before = check(glm, *speculative(method="mtp"), "--json")
    tensors = load_file(glm / "model.safetensors")
    save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, glm / "model.safetensors")
    after = check(glm, *speculative(method="mtp"), "--json")
    assert after.returncode == before.returncode == 0 and after.stdout == before.stdout


def test_a_start_shows_what_the_check_has_said(folders: Folders, tmp_path: Path) -> None:
    arguments = (str(folders.target), *FLAGS, *speculative(**DRAFT))
    planned = json.loads(check(*arguments, "--json").stdout)
    rows = planned["rows"]
    assert any(row["rejected"] for row in rows)
    server = LiveServer(tmp_path / "server", *arguments)
    try:
        server.wait_for(lambda: server.status("/ready") == 200)
        told = httpx.get(f"{server.url}/v1/server_info").json()
        assert told["rows"] == rows
        sizes = [{**group, "num_blocks": 0} for group in told["kv_groups"]]
        assert sizes == planned["kv_groups"] and all(group["num_blocks"] for group in told["kv_groups"])
        families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        samples = [s for family in families if family.name == "outrider_backend_info" for s in family.samples]
        shown = [{name: sample.labels[name] for name in COLUMNS[:5]} for sample in samples if sample.value]
        assert sorted(shown, key=str) == sorted(({name: row[name] for name in COLUMNS[:5]} for row in rows), key=str)
        table = [line.split()[:5] for line in server.log.splitlines()]
        for row in rows:
            assert [row[name] for name in COLUMNS[:5]] in table, row
    finally:
        server.process.terminate()
        server.process.wait(30)
