"""The draft vocabulary's map: offsets or ids, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from server.checkpoint.safetensors_header import read_safetensors_header
from server.engine.models.draft_vocab import DraftVocab, draft_vocab
from server.errors import UserError


def read(
    folder: Path, size: int, vocab_size: int, d2t: Tensor | None, t2d: Tensor | None = None, shift: int = 0
) -> DraftVocab:
    tensors = {"d2t": d2t, "t2d": t2d, "a": torch.zeros(shift, dtype=torch.uint8) if shift else None}
    file = folder / "model.safetensors"
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)
    headers = read_safetensors_header(file)
    return draft_vocab(size, vocab_size, headers.get("d2t"), headers.get("t2d"))


def mask(ids: list[int], vocab_size: int) -> Tensor:
    marked = torch.zeros(vocab_size, dtype=torch.bool)
    marked[ids] = True
    return marked


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 299), min_size=1, max_size=60), st.booleans(), st.booleans())
def test_any_vocabulary(
    tmp_path_factory: pytest.TempPathFactory, kept: set[int], absolute: bool, with_mask: bool
) -> None:
    ids = torch.tensor(sorted(kept))
    offsets = ids - torch.arange(len(ids))
    stored, t2d = (ids if absolute else offsets), (mask(sorted(kept), 300) if with_mask else None)
    doubtful = not with_mask and absolute and int(ids.max()) + len(ids) <= 300
    if doubtful:
        return  # ids that could as well be offsets count as offsets
    found = read(tmp_path_factory.mktemp("map"), len(ids), 300, stored, t2d)
    assert found.target_ids is not None
    assert found.target_ids.dtype is torch.int64
    assert torch.equal(found.target_ids, ids)
    if with_mask or absolute:
        assert ("offsets" in found.why) != absolute or torch.equal(ids, offsets)


def test_ids_beyond_what_bf16_holds(tmp_path: Path) -> None:
    ids = torch.tensor([0, 1, 257, 100_001, 128_255])
    found = read(tmp_path, 5, 128_256, ids - torch.arange(5), mask(ids.tolist(), 128_256), shift=3)
    assert found.target_ids is not None
    assert found.target_ids.tolist() == ids.tolist()


def test_the_same_vocabulary_needs_no_map(tmp_path: Path) -> None:
    assert read(tmp_path, 8, 8, None, torch.ones(8, dtype=torch.bool)).target_ids is None
    assert read(tmp_path, 8, 8, torch.zeros(8, dtype=torch.int64)).target_ids is None
    assert read(tmp_path, 8, 8, torch.arange(8)).target_ids is None


def test_a_reordered_vocabulary_keeps_its_order(tmp_path: Path) -> None:
    found = read(tmp_path, 3, 3, torch.tensor([2, 0, -2]))
    assert found.target_ids is not None
    assert found.target_ids.tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("d2t", "t2d", "message"),
    [
        (None, mask([0, 1, 2], 9), "3 of the target's 9 tokens.*no d2t"),
        (torch.tensor([0, 0, 7]), None, "distinct and below the target's vocabulary size 9"),
        (torch.tensor([0, -1, 0]), None, "2 of 3 differ"),
        (torch.tensor([-1, 0, 0]), None, "ids -1 to 2"),
        (torch.tensor([0, 0, 0]), mask([0, 1, 3], 9), "contradict"),
        (torch.tensor([0, 0, 0]), mask([0, 1], 9), "contradict"),
        (torch.tensor([0, 0]), None, r"I64 \[2\]; it must be I64 \[3\]"),
        (torch.tensor([0, 0, 0], dtype=torch.bfloat16), None, "BF16"),
        (torch.tensor([0, 0, 0], dtype=torch.int32), None, "I32"),
        (torch.tensor([0, 0, 0]), mask([0], 8), r"BOOL or U8 \[9\]"),
    ],
)
def test_broken_maps(d2t: Tensor | None, t2d: Tensor | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, 3, 9, d2t, t2d)
