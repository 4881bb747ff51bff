"""Starts that must fail, and say why, and one that must not need a network (cases e9, f6)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from live_server import LiveServer, Start
from safetensors.torch import load_file, save_file

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def cut_short(folder: Path) -> tuple[str, ...]:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-1024])
    return (WEIGHTS, "model.layers.1.self_attn.v_proj.weight", "truncated")


def emptied(folder: Path) -> tuple[str, ...]:
    (folder / WEIGHTS).write_bytes(b"")
    return (WEIGHTS, "0 bytes")


def junk_header(folder: Path) -> tuple[str, ...]:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(b"\xff" * 64 + content[64:])
    return (WEIGHTS, "header")


def lost_shard(folder: Path) -> tuple[str, ...]:
    split(folder)
    (folder / SHARDS[1]).unlink()
    return (INDEX, SHARDS[1], "missing")


def not_a_number(folder: Path) -> tuple[str, ...]:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    return (WEIGHTS, "model.layers.1.mlp.up_proj.weight", "NaN")


def lost_tensor(folder: Path) -> tuple[str, ...]:
    tensors = load_file(folder / WEIGHTS)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / WEIGHTS)
    return (str(folder), "lm_head.weight", "lacks")


def left_over_tensor(folder: Path) -> tuple[str, ...]:
    save_file(load_file(folder / WEIGHTS) | {"model.layers.7.x": torch.ones(2)}, folder / WEIGHTS)
    return (WEIGHTS, "model.layers.7.x", "no place")


def unknown_architecture(folder: Path) -> tuple[str, ...]:
    (folder / CONFIG).write_text(json.dumps({"architectures": ["FooForCausalLM"], "model_type": "foo"}))
    return ("FooForCausalLM", "not supported", "LlamaForCausalLM")


def no_vocab_size(folder: Path) -> tuple[str, ...]:
    """A config may leave out what is the default of its class, so the tensors tell that this one may not."""
    config = json.loads((folder / CONFIG).read_text())
    del config["vocab_size"]
    (folder / CONFIG).write_text(json.dumps(config))
    return (WEIGHTS, "lm_head.weight", "[32000, ")


def split(folder: Path) -> None:
    """Two shards with an index instead of one file."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    parts = dict(zip(SHARDS, (names[::2], names[1::2]), strict=True))
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / INDEX).write_text(json.dumps(index))


Fault = Callable[[Path], tuple[str, ...]]
"""Damages a model folder and returns what the error must name."""
FAULTS = (cut_short, lost_shard, not_a_number, unknown_architecture, no_vocab_size)
MORE_FAULTS = (emptied, junk_header, lost_tensor, left_over_tensor)


def damaged(tiny_folder: Path, to: Path, fault: Fault) -> tuple[Path, tuple[str, ...]]:
    folder = Path(shutil.copytree(tiny_folder, to / fault.__name__))
    return folder, fault(folder)


@pytest.mark.parametrize("faults", [FAULTS, pytest.param(MORE_FAULTS, marks=pytest.mark.slow)])
def test_damaged_weights_stop_the_start_and_are_named(
    faults: tuple[Fault, ...], start: Start, tiny_folder: Path, tmp_path: Path
) -> None:
    models = [damaged(tiny_folder, tmp_path, fault) for fault in faults]
    servers = [start(str(folder)) for folder, _ in models]
    for server, (folder, named) in zip(servers, models, strict=True):
        assert server.exit_code() == 1, folder
        reason = server.log.strip().splitlines()[-1]
        assert all(word in reason for word in named), reason
        assert "Traceback" not in server.log and "ready at" not in server.log


@pytest.mark.slow
def test_shards_serve_what_one_file_does(start: Start, tiny: LiveServer, tiny_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "shards"))
    split(folder)
    server = start(str(folder), "--num-kv-blocks", "64").ready()
    assert server.token_ids([1, 2, 3], max_tokens=20) == tiny.token_ids([1, 2, 3], max_tokens=20)


OFFLINE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def can_unshare() -> bool:
    """Whether this machine lets us make a network namespace."""
    if shutil.which("unshare") is None or shutil.which("nsenter") is None:
        return False
    return subprocess.run([*OFFLINE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_unshare(), reason="needs network namespaces")
def test_it_starts_and_serves_without_any_network(
    start: Start, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    server = start(str(tiny_folder), "--num-kv-blocks", "64", wrapper=OFFLINE)
    server.wait_for(lambda: "ready at" in server.log or server.process.poll() is not None)
    body = {"prompt": "a", "max_tokens": 2, "ignore_eos": True}
    ask = f"import httpx, sys; print(httpx.post(sys.argv[1], json={body}, trust_env=False).text)"
    inside = ["nsenter", "--user", "--net", "--preserve-credentials", "-t", str(server.api_pid)]
    answer = subprocess.run(
        [*inside, sys.executable, "-c", ask, server.url + "/v1/completions"], capture_output=True, text=True, check=True
    )
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] == 2
    hub = start("no-such-org/no-such-model", wrapper=OFFLINE)
    assert hub.exit_code() == 1
    assert "no-such-org/no-such-model" in hub.log and "Traceback" not in hub.log
