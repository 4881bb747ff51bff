"""GGUF headers, good and hostile."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.checkpoint.gguf_header import read_gguf_header
from server.errors import UserError


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def tensor_info(name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf_file(path: Path, pairs: list[bytes], infos: list[bytes], data: bytes = b"", version: int = 3) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    file = path / "model.gguf"
    file.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return file


def pair(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def write_sample(file: Path) -> bytes:
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "ü", "日本"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    writer.add_tensor("token_embd.weight", np.zeros((3, 64), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float16))
    quantised = gguf.quants.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("blk.0.attn_q.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file.read_bytes()


def test_reads_what_the_formats_own_writer_wrote(tmp_path: Path) -> None:
    file = tmp_path / "sample.gguf"
    data = write_sample(file)
    header = read_gguf_header(file)
    assert header.metadata["general.architecture"] == "llama"
    assert header.metadata["llama.block_count"] == 2
    assert header.metadata["tokenizer.ggml.add_bos_token"] is True
    assert header.metadata["tokenizer.ggml.tokens"] == ["a", "ü", "日本"]
    assert header.metadata["tokenizer.ggml.scores"] == [0.5, -1.0, 2.0]
    found = {name: (tensor.dtype, tensor.shape, tensor.nbytes) for name, tensor in header.tensors.items()}
    assert found == {
        "token_embd.weight": ("F32", (3, 64), 768),
        "output_norm.weight": ("F16", (64,), 128),
        "blk.0.attn_q.weight": ("Q4_0", (4, 64), 144),
    }
    reader = gguf.GGUFReader(file)
    assert {t.name: t.data_offset for t in reader.tensors} == {n: t.offset for n, t in header.tensors.items()}
    last = max(header.tensors.values(), key=lambda tensor: tensor.offset)
    assert last.offset + last.nbytes <= len(data)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_truncation_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    file = tmp_path_factory.mktemp("cut") / "cut.gguf"
    whole = write_sample(file)
    # The file may end in padding that no tensor needs.
    needed = max(tensor.offset + tensor.nbytes for tensor in read_gguf_header(file).tensors.values())
    file.write_bytes(whole[: data.draw(st.integers(0, needed - 1))])
    with pytest.raises(UserError, match="cut.gguf"):
        read_gguf_header(file)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_byte_gives_a_header_or_a_user_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "damaged.gguf"
    whole = bytearray(write_sample(file))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, 600))] = data.draw(st.integers(0, 255))
    file.write_bytes(whole)
    try:
        header = read_gguf_header(file)
    except UserError as error:
        assert "damaged.gguf" in str(error)
    else:
        assert all(tensor.offset + tensor.nbytes <= len(whole) for tensor in header.tensors.values())


U32, STRING, ARRAY = 4, 8, 9
HUGE = 2**64 - 1
HOSTILE = {
    "magic": (b"GGML" + b"\0" * 60, "starts with"),
    "pickle": (b"\x80\x04K\x01.", "starts with"),
    "empty": (b"", "empty"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "more than it can hold"),
    "pair count": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "more than it can hold"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_start(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    with pytest.raises(UserError, match=message):
        read_gguf_header(file)


HOSTILE_PAIRS = {
    "string length": (pair("k", STRING, struct.pack("<Q", HUGE)), "needs 18446744073709551615 bytes"),
    "not utf-8": (pair("k", STRING, struct.pack("<Q", 2) + b"\xff\xfe"), "not UTF-8"),
    "array count": (pair("k", ARRAY, struct.pack("<IQ", U32, HUGE)), "more than the file can hold"),
    "string array count": (pair("k", ARRAY, struct.pack("<IQ", STRING, 2**61)), "more than the file can hold"),
    "string in array": (pair("k", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE)), "cut off at string 0 of 1"),
    "array of arrays": (pair("k", ARRAY, struct.pack("<IQ", ARRAY, 1)), "unsupported value type 9"),
    "value type": (pair("k", 77, b""), "unknown value type 77"),
    "alignment 0": (pair("general.alignment", U32, struct.pack("<I", 0)), "not a power of two"),
    "alignment 3": (pair("general.alignment", U32, struct.pack("<I", 3)), "not a power of two"),
    "alignment text": (pair("general.alignment", STRING, string("x")), "not a power of two"),
    "twice": (pair("k", U32, b"\0" * 4) * 2, "needs|listed twice|starts"),
}


@pytest.mark.parametrize("name", HOSTILE_PAIRS)
def test_hostile_metadata(tmp_path: Path, name: str) -> None:
    data, message = HOSTILE_PAIRS[name]
    pairs = [data[: len(data) // 2], data[len(data) // 2 :]] if name == "twice" else [data]
    with pytest.raises(UserError, match=message):
        read_gguf_header(gguf_file(tmp_path, pairs, [], b"\0" * 64))


HOSTILE_TENSORS = {
    "overflowing dims": (tensor_info(dims=(2**32, 2**32, 4)), "tensor t .* ends at byte"),
    "product wraps to 0": (tensor_info(dims=(2**63, 2)), "tensor t .* ends at byte"),
    "zero dim": (tensor_info(dims=(32, 0)), "tensor t .* cannot have shape"),
    "no dims": (tensor_info(dims=()), "tensor t has 0 dimensions"),
    "five dims": (tensor_info(dims=(1, 1, 1, 1, 1)), "tensor t has 5 dimensions"),
    "partial block": (tensor_info(dims=(33,), kind=2), "tensor t of type Q4_0 cannot have shape"),
    "unknown type": (tensor_info(kind=99), "tensor t has the unknown type 99"),
    "removed type": (tensor_info(kind=4), "tensor t has the unknown type 4"),
    "offset outside": (tensor_info(offset=2**40), "tensor t .* ends at byte"),
    "offset huge": (tensor_info(offset=2**64 - 32), "tensor t .* ends at byte"),
    "offset unaligned": (tensor_info(offset=1), "tensor t starts at offset 1"),
    "one byte short": (tensor_info(dims=(33,)), "tensor t .* ends at byte"),
    "name length": (struct.pack("<Q", HUGE) + b"\0" * 40, "a tensor name at byte"),
}


@pytest.mark.parametrize("name", HOSTILE_TENSORS)
def test_hostile_tensor(tmp_path: Path, name: str) -> None:
    info, message = HOSTILE_TENSORS[name]
    with pytest.raises(UserError, match=message):
        read_gguf_header(gguf_file(tmp_path, [], [info], b"\0" * 128))


def test_the_same_tensor_twice(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tensor t is listed twice"):
        read_gguf_header(gguf_file(tmp_path, [], [tensor_info(), tensor_info()], b"\0" * 128))


def test_a_tensor_that_just_fits(tmp_path: Path) -> None:
    header = read_gguf_header(gguf_file(tmp_path, [], [tensor_info()], b"\0" * 128, version=2))
    assert header.tensors["t"].nbytes == 128


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read_gguf_header(tmp_path)
