"""Safetensors headers: one file, shards, strays, and files that are not whole."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from server.checkpoint.checkpoint import Checkpoint
from server.checkpoint.headers import read_headers
from server.checkpoint.safetensors_header import read_safetensors_header
from server.errors import UserError

A, B, C = (np.full((4, 8), value, dtype=np.float32) for value in (1, 2, 3))


def checkpoint(folder: Path) -> Checkpoint:
    return Checkpoint(folder, "safetensors", {}, {}, str(folder), "hash")


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def raw(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_offsets_are_those_of_the_data(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": A, "half": B.astype(np.float16), "scalar": np.array(7, dtype=np.int64)}, file, {"format": "pt"})
    headers = read_headers(checkpoint(tmp_path))
    assert {(h.name, h.dtype, h.shape) for h in headers.values()} == {
        ("a", "F32", (4, 8)),
        ("half", "F16", (4, 8)),
        ("scalar", "I64", ()),
    }
    data = file.read_bytes()
    for name, array in (("a", A), ("half", B.astype(np.float16))):
        header = headers[name]
        assert data[header.offset : header.offset + header.nbytes] == array.tobytes()


def test_shards_by_index_and_strays_left_aside(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": B, "unlisted": C}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({"a": C, "b": C}, tmp_path / "consolidated.safetensors")
    save_file({"x": C}, tmp_path / "adapter.safetensors")
    (tmp_path / "original").mkdir()
    save_file({"y": C}, tmp_path / "original" / "model.safetensors")
    write_index(tmp_path, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    headers = read_headers(checkpoint(tmp_path))
    assert headers.keys() == {"a", "b", "unlisted"}
    assert headers["a"].file.name == "model-00001-of-00002.safetensors"


@pytest.mark.parametrize("extra", ["mtp.safetensors", "model_mtp.safetensors"])
@pytest.mark.parametrize("indexed", [True, False])
def test_a_next_token_layer_beside_the_model_is_found(tmp_path: Path, extra: str, indexed: bool) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"a": B, "mtp.fc.weight": C}, tmp_path / extra)
    if indexed:
        write_index(tmp_path, {"a": "model.safetensors"})
    headers = read_headers(checkpoint(tmp_path))
    assert {name: header.file.name for name, header in headers.items()} == {
        "a": "model.safetensors",
        "mtp.fc.weight": extra,
    }


def test_a_single_file_of_another_name(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "pytorch_model.safetensors")
    assert read_headers(checkpoint(tmp_path)).keys() == {"a"}


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        save_file({name: A}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="neither model.safetensors.index.json nor model.safetensors"):
        read_headers(checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "gone.safetensors"}, r"names the shard gone\.safetensors \(for tensor a\), which is missing"),
        ({"a": "one.safetensors", "z": "one.safetensors"}, r"one\.safetensors lacks tensor z"),
        ({"a": "../one.safetensors"}, "not the name of a file beside it"),
        ({"a": "/etc/passwd"}, "not the name of a file beside it"),
        ({"a": 3}, "not the name of a file beside it"),
        ({}, "has no weight_map"),
        ([], "has no weight_map"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path: Path, weight_map: Any, message: str) -> None:
    save_file({"a": A}, tmp_path / "one.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(UserError, match=message):
        read_headers(checkpoint(tmp_path))


def test_an_index_that_is_not_json(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json is not valid JSON"):
        read_headers(checkpoint(tmp_path))


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


MALFORMED: dict[str, tuple[Any, str]] = {
    "not json": (b"{{{{", "is not valid JSON"),
    "not utf-8": (b"\xff\xfe{}", "is not valid JSON"),
    "a list": ([], "must hold a JSON object"),
    "deep": (b"[" * 200_000, "is not valid JSON"),
    "entry is a list": ({"t": []}, "entry for tensor t is malformed"),
    "no offsets": ({"t": {"dtype": "F32", "shape": [2]}}, "entry for tensor t is malformed"),
    "unknown dtype": (entry(dtype="F99"), "tensor t has the unknown dtype 'F99'"),
    "negative dim": (entry(shape=[-2]), "entry for tensor t is malformed"),
    "float dim": (entry(shape=[2.0]), "entry for tensor t is malformed"),
    "overflowing dims": (entry(shape=[2**33, 2**31]), "tensor t .* cannot lie between"),
    "backwards": (entry(offsets=[8, 0]), "tensor t .* cannot lie between"),
    "negative offset": (entry(offsets=[-8, 0]), "tensor t .* cannot lie between"),
    "behind the end": (entry(shape=[4], offsets=[0, 16]), "truncated: tensor t ends at byte"),
    "hole": (entry(shape=[1], offsets=[4, 8]), "tensor t starts at byte"),
    "overlap": (entry() | {"u": entry(offsets=[0, 8])["t"]}, "starts at byte"),
    "rest": (entry(shape=[1], offsets=[0, 4]), "4 bytes follow its last tensor"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed(tmp_path: Path, name: str) -> None:
    header, message = MALFORMED[name]
    with pytest.raises(UserError, match=message) as caught:
        read_safetensors_header(raw(tmp_path / "bad.safetensors", header, b"\0" * 8))
    assert "bad.safetensors" in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 4096, struct.pack("<Q", 10**9) + b"{}"])
def test_no_header(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(data)
    with pytest.raises(UserError, match="bad.safetensors is not a usable safetensors file"):
        read_safetensors_header(file)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_every_truncation_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("cut") / "cut.safetensors"
    save_file({"a": A, "b": B}, file)
    whole = file.read_bytes()
    file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    with pytest.raises(UserError, match="cut.safetensors"):
        read_safetensors_header(file)


def test_a_cut_names_the_tensor_that_is_not_whole(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000, np.float32), "b": np.zeros(1000, np.float32)}, file)
    file.write_bytes(file.read_bytes()[:-1024])
    with pytest.raises(UserError, match=r"model\.safetensors .*truncated: tensor b ends at byte"):
        read_safetensors_header(file)
